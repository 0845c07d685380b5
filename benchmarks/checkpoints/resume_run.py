"""One rank of the resume matrix: saves under the plans of its world, or resumes under them."""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.checkpoints.fits import LAYOUTS, fit, quiet, world_of

FORMS = {"file": {}, "directory": {"save_distributed_checkpoint": True}}
"""What a checkpoint is, and the strategy's options."""


def path_of(folder: Path, plan: str, form: str) -> Path:
    """Where a plan's checkpoint is."""
    return folder / f"{list(LAYOUTS).index(plan)}-{form}.ckpt"


def save_all(folder: Path, plans: Iterable[str]) -> dict[str, list[float]]:
    """Save under each plan in each form; what uninterrupted runs are."""
    return {
        f"{plan}|{form}": fit(plan, folder, saves_to=path_of(folder, plan, form), **options)
        for plan in plans
        for form, options in FORMS.items()
    }


def resume_all(folder: Path, pairs: Iterable[tuple[str, str]]) -> dict[str, list[float]]:
    """Go on from what other plans have saved, in each form."""
    return {
        f"{first}|{second}|{form}": fit(second, folder, resumes=path_of(folder, first, form))
        for first, second in pairs
        for form in FORMS
    }


def main() -> None:
    """Do what is asked of the plans of this world."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("work", choices=["save", "resume"])
    parser.add_argument("pairs", type=json.loads)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    quiet()
    world = int(os.environ["WORLD_SIZE"])
    if given.work == "save":
        found = save_all(given.folder, [plan for plan in LAYOUTS if world_of(plan) == world])
    else:
        found = resume_all(
            given.folder, [(first, second) for first, second in given.pairs if world_of(second) == world]
        )
    if os.environ["RANK"] == "0" and given.out is not None:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
