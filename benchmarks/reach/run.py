"""Ordinary architectures under forced plans: ``python -m benchmarks.reach.run`` writes ``records/reach_*.json``.

Honesty must not cost reach: a plan that could train a model must not be refused for fear. Every architecture trains
for two epochs on two processes under DDP and under each plan; a cell is what ``benchmarks.uses.run`` says of one.
Modules are in double precision, but transformers computes losses, positions and norms in single precision.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.reach.models import ARCHITECTURES, BATCH, Architecture, Training, loader
from benchmarks.record import Sample, make_record, write_record
from benchmarks.uses.run import GOOD, Cell, attempts, judged, portable
from benchmarks.uses.session import SINGLE, Session, Use
from lightning_mist import Plan
from tests.fits import plan


def _halves(blocks: int, microbatches: int) -> Plan:
    return plan([(blocks // 2, [1]), (blocks - blocks // 2, [0])], rows=BATCH, microbatches=microbatches)


PLANS: dict[str, Callable[[int], Plan]] = {
    "plain": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=1),
    "cut in 2": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=2),
    "checkpointing": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=1, checkpointed=2),
    "ZeRO-1": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=1, zero=1),
    "ZeRO-2": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=1, zero=2),
    "ZeRO-3": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=1, zero=3),
    "ZeRO-3, cut in 2": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=2, zero=3),
    "pp 2": lambda blocks: _halves(blocks, 2),
    "pp 2, cut in 2": lambda blocks: _halves(blocks, 4),
    "tp 2": lambda blocks: plan([(blocks, [0, 1])], rows=BATCH, microbatches=2, tensor=2),
}
"""For two ranks and so many blocks."""


def use_of(architecture: Architecture) -> Use:
    """Training an architecture, as a use of Lightning."""

    def run(session: Session) -> None:
        session.fit(Training(architecture.make().double()), loader(architecture.rows()))

    return Use(theme="architecture", name=architecture.name, run=run, tolerance=SINGLE)


def cells_of(architecture: Architecture, plans: Sequence[str], folder: Path) -> dict[str, Cell]:
    """What becomes of an architecture under plans."""
    use = use_of(architecture)
    ((_, ddp),) = attempts([use], None, folder, patience_seconds=120.0)
    found = {}
    for name in plans:
        ((_, result),) = attempts([use], PLANS[name](architecture.blocks), folder, patience_seconds=120.0)
        found[name] = judged(use, ddp.found, result)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="architectures with this in their name")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    rows: list[Sample] = []
    reasons: dict[str, int] = {}
    cells = []
    for architecture in ARCHITECTURES:
        if options.only and not any(text in architecture.name for text in options.only):
            continue
        with tempfile.TemporaryDirectory() as directory:
            found = cells_of(architecture, options.plans, Path(directory) / "fit")
        row: Sample = {"architecture": architecture.name}
        for name, cell in found.items():
            cells.append(cell)
            text = portable(cell.text)
            number = f" ({reasons.setdefault(text, len(reasons) + 1)})" if cell.kind != "same" else ""
            row[name] = f"{cell.kind}{number}"
            print(f"{architecture.name}, {name}: {cell.kind} {text[-300:]}", flush=True)
        rows.append(row)
    kinds = [cell.kind for cell in cells]
    summary = f"Of {len(kinds)} cells " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(summary)
    if not options.no_record:
        notes = f"{summary}. " + " ".join(f"({number}) {text.rstrip('.')}." for text, number in reasons.items())
        print(write_record(make_record("reach", rows, notes=notes)))
    return 0 if all(kind in GOOD for kind in kinds) else 1


if __name__ == "__main__":
    sys.exit(main())
