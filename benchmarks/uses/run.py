"""Every use under every plan, beside DDP: ``python -m benchmarks.uses.run`` writes ``records/uses_*.json``.

Uses run one after the other in a pair of processes, and in a new one after each that fails. What each rank saw (losses,
metrics, files, weights, and what the use itself looks at) is compared with what it saw under DDP; every cell is

* ``same``: within the tolerance, or the same error as under DDP;
* ``other, said``: other numbers by the same rules, and said so (dropout's masks);
* ``refused``: not trained, and said so before the first batch, or ``stopped`` while training, by an error of ours;
* ``wrong``, ``crash``, ``hang``: what must not be.

What is done is kept in a folder, so that a run that was ended goes on where it was (``--work``).
"""

import argparse
import json
import os
import pickle
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, Sample, make_record, write_record
from benchmarks.uses import callbacks, data, life, log_flags, loops, worker
from benchmarks.uses.session import Use, difference
from lightning_mist import Plan
from tests.ranks import run_ranks
from tests.traps.project import PLANS

USES: list[Use] = [
    use
    for collection in (
        log_flags.uses,
        callbacks.uses,
        callbacks.own,
        loops.uses,
        loops.precisions,
        loops.more,
        data.uses,
        life.optimizers,
        life.life,
    )
    for use in collection.every
]

COLUMNS = {
    "plain": "plain",
    "ZeRO-1": "zero1",
    "ZeRO-3": "zero3",
    "pp 2, whole batches": "pp2",
    "pp 2, cut batches": "pp2cut",
    "tp 2": "tp2",
}
"""Columns of the table, and the plans."""

RANKS = 2
GOOD = ("same", "refused", "stopped", "other, said")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a use under a plan or DDP.

    Attributes:
        found: What each rank kept; None of one that ended without a word.
        is_late: Whether time ran out.
        printed: What the processes printed.
    """

    found: tuple[Any, ...]
    is_late: bool
    printed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What became of a use under a plan.

    Attributes:
        kind: In a word.
        text: The reason, or what differs.
    """

    kind: str
    text: str = ""


def attempts(
    uses: Sequence[Use], plan: Plan | str | None, folder: Path, *, patience_seconds: float
) -> Iterator[tuple[Use, Result]]:
    """Uses under a plan, or DDP, one after the other in a pair of processes, and in a new one after each that fails."""
    rest = list(uses)
    while rest:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        child = _forked(rest, plan, folder)
        done, seen, is_late = 0, time.monotonic(), False
        while not (has_ended := os.waitpid(child, os.WNOHANG) != (0, 0)) and not is_late:
            time.sleep(0.05)
            if all(worker.path_of(folder, done, rank).exists() for rank in range(RANKS)) and done < len(rest) - 1:
                done, seen = done + 1, time.monotonic()
            is_late = time.monotonic() > seen + patience_seconds
        if not has_ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        printed = (folder / "printed.txt").read_text(errors="replace")
        for number, use in enumerate(rest):
            found = [worker.read(folder, number, rank) for rank in range(RANKS)]
            failed = any(item is None or "error" in item for item in found)
            yield use, Result(found=tuple(found), is_late=failed and is_late, printed=printed)
            if failed:
                break
        rest = rest[number + 1 :]


def _forked(uses: Sequence[Use], plan: Plan | str | None, folder: Path) -> int:
    """The process that has forked a pair for these uses."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    with (folder / "printed.txt").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os._exit(run_ranks(RANKS, lambda: worker.run(uses, plan, folder), patience_seconds=30.0))


def judged(use: Use, ddp: Sequence[Any], result: Result) -> Cell:
    """A cell from what every rank kept under DDP and under a plan."""
    found = result.found
    if result.is_late:
        return Cell(kind="hang", text=result.printed[-2000:])
    errors = [item for item in found if item is not None and "error" in item]
    wanted = [item["error"] for item in ddp if item is not None and "error" in item]
    if not errors and None not in found:
        if wanted:
            return Cell(kind="wrong", text=f"trained, but DDP does not: {wanted[0]}")
        for rank, (one, other) in enumerate(zip(ddp, found, strict=True)):
            text = difference(one["seen"], other["seen"], use.tolerance)
            if text and use.said and use.said in result.printed:
                return Cell(kind="other, said", text=use.said)
            if text:
                return Cell(kind="wrong", text=f"rank {rank}: {text}")
        return Cell(kind="same")
    # The others may only see that their peer has ended.
    if any(item["error"] in wanted for item in errors):
        return Cell(kind="same", text=f"the same error: {wanted[0]}")
    ours = [item for item in errors if item["is_ours"]]
    if not ours:
        return Cell(kind="crash", text=errors[0]["traceback"][-2000:] if errors else result.printed[-2000:])
    if wanted:
        return Cell(kind="same", text=f"no training either: {ours[0]['error']}")
    has_begun = len(ours) < len(found) or any(item["has_begun"] for item in ours)
    return Cell(kind="stopped" if has_begun else "refused", text=ours[0]["error"])


class Work:
    """What is done, in a folder: a run that was ended goes on where it was.

    Args:
        folder: Where.
        again: Whether cells are made again.
        patience_seconds: After which a use hangs.
        plans: By the names that :meth:`cells` gets.
    """

    def __init__(
        self, folder: Path, *, again: bool, patience_seconds: float, plans: Mapping[str, Plan | str] = PLANS
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._patience_seconds, self._plans = folder, patience_seconds, plans
        self._path, self._ddp_path = folder / "cells.json", folder / "ddp.pickle"
        self._cells: dict[str, list[str]] = {}
        self._ddp: dict[str, tuple[Any, ...]] = {}
        if not again and self._path.exists():
            self._cells = json.loads(self._path.read_text())
        if not again and self._ddp_path.exists():
            self._ddp = pickle.loads(self._ddp_path.read_bytes())

    def cells(self, uses: Sequence[Use], plans: Sequence[str]) -> dict[tuple[str, str], Cell]:
        """Every use under every plan, a theme after the other."""
        found: dict[tuple[str, str], Cell] = {}
        for theme in dict.fromkeys(use.theme for use in uses):
            every = [use for use in uses if use.theme == theme]
            for use, result in self._attempts([use for use in every if use.key not in self._ddp], None):
                self._ddp[use.key] = result.found
            self._ddp_path.write_bytes(pickle.dumps(self._ddp))
            for plan in plans:
                lacking = [use for use in every if f"{use.key}, {plan}" not in self._cells]
                for use, result in self._attempts(lacking, plan):
                    cell = judged(use, self._ddp[use.key], result)
                    self._cells[f"{use.key}, {plan}"] = [cell.kind, cell.text]
                    self._path.write_text(json.dumps(self._cells, indent=1))
                    text = " ".join(cell.text.split())[-200:]
                    print(f"{use.key}, {plan}: {cell.kind}{text and f' ({text})'}", flush=True)
                for use in every:
                    kind, text = self._cells[f"{use.key}, {plan}"]
                    found[use.key, plan] = Cell(kind=kind, text=text)
        return found

    def _attempts(self, uses: Sequence[Use], plan: str | None) -> Iterator[tuple[Use, Result]]:
        given = None if plan is None else self._plans[plan]
        return attempts(uses, given, self._folder / "fit", patience_seconds=self._patience_seconds)


def portable(text: str) -> str:
    """A text on one line, with paths as from the repository or from where packages are."""
    for folder in (str(ROOT), sysconfig.get_path("purelib"), tempfile.gettempdir()):
        text = text.replace(f"{folder}/", "")
    return " ".join(text.split())


def rows_of(
    uses: Sequence[Use], found: Mapping[tuple[str, str], Cell], columns: Mapping[str, str] = COLUMNS
) -> tuple[list[Sample], str]:
    """The table, and below it the reasons of what is not the same."""
    rows: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    for use in uses:
        row: Sample = {"of": use.theme, "use": use.name}
        for column, plan in columns.items():
            cell = found.get((use.key, plan))
            if cell is None:
                continue
            if cell.kind == "same":
                row[column] = "same error" if cell.text else "same"
                continue
            text = portable(cell.text)
            numbers = reasons.setdefault(text, [])
            numbers.append(f"{use.name} under {column}")
            row[column] = f"{cell.kind} ({list(reasons).index(text) + 1})"
        rows.append(row)
    return rows, " ".join(f"({number}) {text.rstrip('.')}." for number, text in enumerate(reasons, start=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="uses with this in theme or name")
    parser.add_argument("--plans", nargs="+", default=list(COLUMNS.values()), choices=list(COLUMNS.values()))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lightning-mist-uses")
    parser.add_argument("--again", action="store_true", help="do again what is in the folder")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which a fit hangs")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    uses = [use for use in USES if not options.only or any(text in use.key for text in options.only)]
    work = Work(options.work, again=options.again, patience_seconds=options.patience)
    found = work.cells(uses, options.plans)
    kinds = [cell.kind for cell in found.values()]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys([*GOOD, *kinds])}
    summary = f"{len(uses)} uses: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(summary)
    if not options.no_record:
        rows, reasons = rows_of(uses, found)
        write_record(make_record("uses", rows, notes=f"{summary}. {reasons}"))
    return 0 if all(kind in GOOD for kind in kinds) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(2)
