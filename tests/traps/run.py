"""Runs traps: ``python -m tests.traps.run FAMILY [--only NAME ...] [--plans NAME ...]`` prints what became of them.

Every fit has a pair of processes of its own, forked from one that has imported everything, so that one that hangs or
dies takes nothing with it.
"""

import argparse
import importlib
import json
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.tiers import tiered
from tests.traps import worker
from tests.traps.outcome import GOOD, Outcome, outcome_of
from tests.traps.project import Trap

RANKS = 2
PATIENCE_SECONDS = 90.0


def _forked(trap: Trap, plan: str, folder: Path) -> tuple[list[Any], bool, str]:
    """One fit in processes of its own: what its ranks wrote, whether time ran out, and what was printed."""
    folder.mkdir(parents=True)
    printed = folder / "printed.txt"
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with printed.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(run_ranks(RANKS, lambda: worker.run(trap, plan, folder), patience_seconds=30.0))
    end = time.monotonic() + PATIENCE_SECONDS
    while (is_late := time.monotonic() > end) is False and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.02)
    if is_late:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    files = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return found, is_late, printed.read_text(errors="replace")


def outcomes(traps: Mapping[str, Trap], plans: Sequence[str] = ()) -> dict[tuple[str, str], Outcome]:
    """What becomes of every trap under each of its plans.

    Args:
        traps: The traps by name.
        plans: Only under these plans, if any are given.
    """
    made = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, trap) in enumerate(traps.items()):
            ddp, _, _ = _forked(trap, "ddp", Path(directory) / f"{number}-ddp")
            for plan in trap.plans:
                if plans and plan not in plans:
                    continue
                found, is_late, output = _forked(trap, plan, Path(directory) / f"{number}-{plan}")
                made[name, plan] = outcome_of(ddp, found, tolerance=trap.tolerance, is_late=is_late, output=output)
    return made


def check(trap: Trap, plan: str, outcome: Outcome) -> None:
    """Fail unless a trap did no harm, for the reason that it is about, where it may not train."""
    assert outcome.kind in GOOD, f"{outcome.kind}: {outcome.text}"
    if plan in trap.equal:
        assert outcome.kind == "equal", f"{outcome.kind}: {outcome.text}"
        assert trap.whole is None or (outcome.whole is not None) == (plan in trap.whole), outcome.whole
    if outcome.kind in ("refused", "stopped"):
        assert trap.reason in outcome.text, outcome.text


def cases(traps: Mapping[str, Trap], first: Sequence[str]) -> list[Any]:
    """Every trap under each of its plans, as values of ``name`` and ``plan``.

    Args:
        traps: The traps by name.
        first: Names of those that are in the first tier too, each under one of its plans: of the first trap the first
            plan, of the second the second, and so on in turn.
    """
    chosen = {(name, traps[name].plans[number % len(traps[name].plans)]) for number, name in enumerate(first)}
    return tiered([(name, plan) for name, trap in traps.items() for plan in trap.plans], chosen)


def run_apart(family: str, folder: Path, chosen: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """Outcomes of a family of traps, from a process that has no threads of others when it forks.

    Args:
        family: Name of the module of this package that has them in ``TRAPS``.
        folder: For the answer.
        chosen: Names of the traps to run, and of their plans.
    """
    from tests.workers import forks

    path = folder / "outcomes.pickle"
    process = forks().Process(target=_write_outcomes, args=(family, list(chosen), path))
    process.start()
    process.join()
    found: dict[tuple[str, str], Outcome] = pickle.loads(path.read_bytes())
    return found


def _write_outcomes(family: str, chosen: Sequence[tuple[str, str]], path: Path) -> None:
    every: dict[str, Trap] = importlib.import_module(f"tests.traps.{family}").TRAPS
    made: dict[tuple[str, str], Outcome] = {}
    for name in dict.fromkeys(name for name, _ in chosen):
        made |= outcomes({name: every[name]}, [plan for other, plan in chosen if other == name])
    path.write_bytes(pickle.dumps(made))


def main() -> None:
    """Run traps of a family and print their outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--plans", nargs="*", default=())
    parser.add_argument("--full", action="store_true", help="print texts whole")
    arguments = parser.parse_args()
    every: dict[str, Trap] = importlib.import_module(f"tests.traps.{arguments.family}").TRAPS
    for name, trap in every.items():
        if arguments.only and name not in arguments.only:
            continue
        for key, outcome in outcomes({name: trap}, arguments.plans).items():
            text = outcome.whole or ""
            text += outcome.text if arguments.full else " ".join(outcome.text.split())[-160:]
            print(f"{name:36s} {key[1]:8s} {outcome.kind:8s} {text}", flush=True)


if __name__ == "__main__":
    main()
