"""Validation, test and prediction under every kind of plan against Lightning's DDP.

A cell is the largest relative difference of any number that a rank saw: what it logged, batch by batch and at the end,
outputs as callbacks get them, predictions, buffers, and the weights before and after. Hooks, in their order, and which
modules are in training mode must be equal. Double precision must agree to 1e-10, single precision to 1e-5; a cell that
does not is named, and the exit status is 1. Ranks are processes, by Lightning as a project would start it.
"""

import argparse
import math
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.evaluated import LOADERS, WAYS, Session, keep
from benchmarks.parity.plans import LAYOUTS, make_plan
from benchmarks.parity.table import notes_of
from benchmarks.record import Sample, make_record, write_record
from tests.integration.parity import TOLERANCE
from tests.ranks import run_ranks
from tests.traps.project import LAYERS, ROWS

PLANS = (
    "dp 2, ZeRO 0",
    "dp 2, ZeRO 1",
    "dp 2, ZeRO 2",
    "dp 3, ZeRO 3",
    "dp 2, ZeRO 3, some recomputed, offload 1 0.3 1 0.3",
    "tp 2",
    "interleaved, 2 groups of 2 chunks",
    "zero bubble, pp 2",
    "zero bubble, pp 2, all offloaded",
    "pp 2 x tp 2",
    "pp 2 x dp 2, ZeRO 3, some recomputed",
    "dp 4, ZeRO 3, HSDP 2 x 2",
)
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}
NETWORKS = {"frozen batch norm": True, "batch norm": False}
"""And whether its norm is frozen; the other is tried in double precision only."""


Seen = tuple[dict[Any, Any], str]
"""What a rank saw, here by loader, way and time, and the error that ended it."""


def on_ranks(world: int, folder: Path, work: Callable[[Path], None]) -> list[Seen]:
    """Do some work on ranks in processes of their own, each told where to write what it saw; what every rank saw."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        with (folder / "printed.txt").open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(run_ranks(world, lambda: work(folder / f"{os.environ['RANK']}.pickle"), patience_seconds=30.0))
    os.waitpid(child, 0)
    files = [folder / f"{number}.pickle" for number in range(world)]
    printed = (folder / "printed.txt").read_text(errors="replace")
    return [pickle.loads(file.read_bytes()) if file.exists() else ({}, printed[-3000:]) for file in files]


def evaluated(plan_name: str | None, world: int, dtype: torch.dtype, *, is_frozen: bool, folder: Path) -> list[Seen]:
    """Evaluate under a plan, or DDP; what every rank saw."""
    plan = None if plan_name is None else make_plan(LAYOUTS[plan_name], LAYERS, rows=ROWS)
    session = Session(plan, dtype, folder, is_frozen=is_frozen)
    return on_ranks(world, folder, partial(keep, partial(session.every, tuple(LOADERS))))


def distance(wanted: Any, found: Any, where: str = "") -> tuple[float, str]:
    """The largest relative difference of two nestings, and where it is; infinite where they differ otherwise."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping) and wanted.keys() == found.keys():
        pairs = [(f"{where} {name}", wanted[name], found[name]) for name in wanted]
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        if wanted and all(type(item) is float for item in (*wanted, *found)):
            scale = max([1.0, *(abs(item) for item in wanted if math.isfinite(item))])
            return max(_apart(one, other) for one, other in zip(wanted, found, strict=True)) / scale, where
        pairs = [(f"{where} {at}", *pair) for at, pair in enumerate(zip(wanted, found, strict=True))]
    elif type(wanted) is float and type(found) is float:
        return _apart(wanted, found) / max(1.0, abs(wanted)), where
    else:
        return (0.0 if wanted == found else math.inf), f"{where}: {str(found)[:60]}, not {str(wanted)[:60]}"
    return max((distance(one, other, place) for place, one, other in pairs), default=(0.0, where), key=lambda x: x[0])


def _apart(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf


class Table:
    """The rows, what differs, and why plans were refused."""

    def __init__(self) -> None:
        self.rows: list[Sample] = []
        self.differing: list[str] = []
        self.reasons: dict[str, list[str]] = {}

    def add(
        self, plan: str, of: Mapping[str, str], ddp: Sequence[Seen], found: Sequence[Seen], tolerance: float
    ) -> None:
        """What every rank saw under a plan, beside DDP: a row for each loader."""
        error = next((error for seen, error in found if error), "")
        if error and not any(seen for seen, _ in found) and "Traceback" not in error:
            self.reasons.setdefault(" ".join(error.split()).rstrip("."), []).append(f"{plan}, {of['network']}")
            self.rows.append({"plan": plan, **of, "loaders": "all", **dict.fromkeys(WAYS, "refused")})
            return
        for loader in LOADERS:
            row: Sample = {"plan": plan, **of, "loaders": loader}
            for way in WAYS:
                row[way] = self._cell(f"{plan}, {of}", loader, way, ddp, found, tolerance)
            self.rows.append(row)
        for (loader, way, when), reason in found[0][0].items():
            if way == "whole" and reason is not None:
                self.differing.append(f"{plan}, {of}, {loader}, {when}: on the whole module: {reason}")
        if error:
            self.differing.append(f"{plan}, {of}: {error}")

    def _cell(
        self, name: str, loader: str, way: str, ddp: Sequence[Seen], found: Sequence[Seen], tolerance: float
    ) -> str:
        worst, lines = 0.0, []
        for rank, ((wanted, _), (seen, _)) in enumerate(zip(ddp, found, strict=True)):
            for key in wanted:
                if key[:2] == (loader, way):
                    apart, where = distance(wanted[key], seen.get(key))
                    worst = max(worst, apart)
                    if not apart <= tolerance:
                        lines.append(f"{name}, {', '.join(key)}, rank {rank}: off by {apart:.1e} at{where}")
        self.differing += lines
        return "differs" if lines else f"{worst:.1e}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Fill the table and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(LAYOUTS), metavar="PLAN")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(None if arguments is None else list(arguments))
    table = Table()
    with tempfile.TemporaryDirectory() as directory:
        cases = [(n, p) for n in options.networks for p in options.precisions if NETWORKS[n] or p == "float64"]
        for number, (network, precision) in enumerate(cases):
            of, dtype, is_frozen = (
                {"network": network, "precision": precision},
                PRECISIONS[precision],
                NETWORKS[network],
            )
            ddp: dict[int, list[Seen]] = {}
            for plan in options.plans:
                world = sum(group.ranks for group in LAYOUTS[plan].groups)
                if world not in ddp:
                    folder = Path(directory) / f"{number}-{world}"
                    ddp[world] = evaluated(None, world, dtype, is_frozen=is_frozen, folder=folder)
                    assert not any(error for _, error in ddp[world]), ddp[world][0][1]
                folder = Path(directory) / f"{number}-{plan}"
                found = evaluated(plan, world, dtype, is_frozen=is_frozen, folder=folder)
                before, was = len(table.rows), len(table.differing)
                table.add(plan, of, ddp[world], found, TOLERANCE[dtype])
                for row in table.rows[before:]:
                    print(", ".join(str(value) for value in row.values()), flush=True)
                print("".join(f"{line}\n" for line in table.differing[was:]), end="", flush=True)
    cells = sum(row[way] != "refused" for row in table.rows for way in WAYS)
    print("".join(f"refused: {reason} ({'; '.join(cells_of)})\n" for reason, cells_of in table.reasons.items()), end="")
    print(f"{cells} cells, {sum(row[way] == 'differs' for row in table.rows for way in WAYS)} differ")
    if not options.no_record:
        what = "Largest relative difference from DDP of anything that a rank sees in evaluation."
        write_record(make_record("parity-evaluation", table.rows, notes=notes_of(what, table.reasons)))
    return 1 if table.differing else 0


if __name__ == "__main__":
    sys.exit(main())
