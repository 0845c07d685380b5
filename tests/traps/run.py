"""Runs traps: ``python -m tests.traps.run FAMILY [--only NAME ...] [--plans NAME ...]`` prints what became of them.

Every fit has a pair of processes of its own, forked from one that has imported everything, so that one that hangs or
dies takes nothing with it.
"""

import argparse
import importlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fits import quiet
from tests.tiers import tiered
from tests.traps import worker
from tests.traps.outcome import GOOD, Outcome, outcome_of
from tests.traps.project import Trap
from tests.workers import forked

PATIENCE_SECONDS = 90.0


def traps_of(family: str) -> dict[str, Trap]:
    """The traps of a module of this package, by name."""
    traps: dict[str, Trap] = importlib.import_module(f"tests.traps.{family}").TRAPS
    return traps


def fit(trap: Trap, plan: str, folder: Path) -> tuple[list[Any], bool, str]:
    """One fit in processes of its own: what its ranks wrote, whether time ran out, and what was printed."""
    return forked(lambda: worker.run(trap, plan, folder / plan), folder / plan, seconds=PATIENCE_SECONDS)


def outcomes(family: str, name: str, plans: Sequence[str]) -> dict[str, Outcome]:
    """What becomes of a trap under some of its plans."""
    trap, made = traps_of(family)[name], {}
    with tempfile.TemporaryDirectory() as directory:
        ddp, _, _ = fit(trap, "ddp", Path(directory))
        for plan in plans:
            found, is_late, output = fit(trap, plan, Path(directory))
            made[plan] = outcome_of(ddp, found, tolerance=trap.tolerance, is_late=is_late, output=output)
    return made


def check(family: str, name: str, plan: str, outcome: Outcome) -> None:
    """Fail unless a trap did no harm, for the reason that it is about, where it may not train."""
    trap = traps_of(family)[name]
    assert outcome.kind in GOOD, f"{outcome.kind}: {outcome.text}"
    if plan in trap.equal:
        assert outcome.kind == "equal", f"{outcome.kind}: {outcome.text}"
        assert trap.whole is None or (outcome.whole is not None) == (plan in trap.whole), outcome.whole
    if outcome.kind in ("refused", "stopped"):
        assert trap.reason in outcome.text, outcome.text


def cases(first: Mapping[str, Sequence[str]]) -> list[Any]:
    """Every trap of some families under each of its plans, as values of ``family``, ``name`` and ``plan``.

    Args:
        first: By family the names of those that are in the first tier too, each under one of its plans: of the first
            trap the first plan, of the second the second, and so on in turn, or the plan after a stroke.
    """
    every: list[tuple[str, str, str]] = []
    chosen = set()
    for family, names in first.items():
        traps = traps_of(family)
        every += [(family, name, plan) for name, trap in traps.items() for plan in trap.plans]
        for number, (name, _, plan) in enumerate(name.partition("/") for name in names):
            plans = traps[name].plans
            chosen.add((family, name, plan or plans[number % len(plans)]))
    return tiered(every, chosen)


def main() -> None:
    """Run traps of a family and print their outcomes."""
    quiet()
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--plans", nargs="*", default=())
    parser.add_argument("--full", action="store_true", help="print texts whole")
    arguments = parser.parse_args()
    for name, trap in traps_of(arguments.family).items():
        plans = [plan for plan in trap.plans if not arguments.plans or plan in arguments.plans]
        if not plans or (arguments.only and name not in arguments.only):
            continue
        for plan, outcome in outcomes(arguments.family, name, plans).items():
            text = outcome.whole or ""
            text += outcome.text if arguments.full else " ".join(outcome.text.split())[-160:]
            print(f"{name:36s} {plan:8s} {outcome.kind:8s} {text}", flush=True)


if __name__ == "__main__":
    main()
