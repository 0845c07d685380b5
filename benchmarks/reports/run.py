"""Every public report under every plan, beside DDP: ``python -m benchmarks.reports.run`` writes its record.

Reports run as uses do (``benchmarks.uses.run``): one after the other in a pair of processes, and in a new one after
each that fails; what each rank saw is compared with what it saw under DDP, and cells are in the same words.
"""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import make_record, write_record
from benchmarks.reports import data, networks, training
from benchmarks.uses.run import GOOD, Cell, Work, rows_of
from benchmarks.uses.session import Use
from lightning_mist import Plan
from tests.fits import plan
from tests.traps.project import LAYERS, PLANS, ROWS

REPORTS: list[Use] = [report for theme in (networks, training, data) for report in theme.reports.every]

LAYERS_OF = {key: layers for theme in (networks, training, data) for key, layers in theme.reports.layers.items()}

COLUMNS = {"mist": "auto", "ZeRO-1": "zero1", "ZeRO-3": "zero3", "pp 2": "pp2", "tp 2": "tp2"}
"""Columns of the table, and the plans; the first is the plain word, which plans for itself."""


def plans_of(layers: int) -> dict[str, Plan | str]:
    """The plans for modules of so many layers, by names of their own."""
    if layers == LAYERS:
        return {name: PLANS[name] for name in COLUMNS.values()}
    half, ranks = (layers + 1) // 2, [0, 1]
    return {
        "auto": "auto",
        "zero1": plan([(layers, ranks)], rows=ROWS, microbatches=1, zero=1),
        "zero3": plan([(layers, ranks)], rows=ROWS, microbatches=1, zero=3, checkpointed=1),
        # Of no layers there are no two stages: those of four are refused.
        "pp2": PLANS["pp2"] if not layers else plan([(half, [1]), (half, [0])], rows=ROWS, microbatches=2),
        "tp2": plan([(layers, ranks)], rows=ROWS, microbatches=2, tensor=2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="reports with this in theme or name")
    parser.add_argument("--plans", nargs="+", default=list(COLUMNS.values()), choices=list(COLUMNS.values()))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lightning-mist-reports")
    parser.add_argument("--again", action="store_true", help="do again what is in the folder")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which a fit hangs")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    reports = [report for report in REPORTS if not options.only or any(text in report.key for text in options.only)]
    found: dict[tuple[str, str], Cell] = {}
    for layers in dict.fromkeys(LAYERS_OF[report.key] for report in reports):
        folder = options.work / f"{layers}-layers"
        work = Work(folder, again=options.again, patience_seconds=options.patience, plans=plans_of(layers))
        found |= work.cells([report for report in reports if LAYERS_OF[report.key] == layers], options.plans)
    kinds = [cell.kind for cell in found.values()]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys([*GOOD, *kinds])}
    summary = f"{len(reports)} reports: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(summary)
    if not options.no_record:
        rows, reasons = rows_of(reports, found, COLUMNS)
        samples = []
        for row in rows:
            thread, _, title = str(row.pop("use")).partition(" ")
            samples.append({"of": row.pop("of"), "report": thread, "title": title.replace("|", "\\|"), **row})
        write_record(make_record("public-bugs", samples, notes=f"{summary}. {reasons}"))
    return 0 if all(kind in GOOD for kind in kinds) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(2)
