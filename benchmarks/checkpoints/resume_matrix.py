"""Every pair of plans, of which one saves after three steps and the other goes on for three: the losses go on, too.

Pipelines, tensor parallelism, ZeRO, hybrid sharding and offload on 1, 2 and 4 processes, checkpoints as files and as
directories, in double precision. Held against a run of one process that nobody interrupts: losses and the norm of all
weights must agree to 1e-10. To the bit must agree: what goes on under the plan that saved, with that plan's own run,
and what goes on from a directory, with what goes on from a file. The exit status is 1 otherwise.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable

from benchmarks.checkpoints.fits import LAYOUTS, STEPS
from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record

TOLERANCE = 1e-10
WORLDS = (1, 2, 4)
_WORKER = "benchmarks.checkpoints.resume_run"


def pairs_of(names: Iterable[str], strides: Iterable[int]) -> list[tuple[str, str]]:
    """Ordered pairs: each plan is resumed under itself and those that stand so many places behind it, in a circle."""
    every = list(names)
    return [
        (first, every[(index + stride) % len(every)]) for stride in (0, *strides) for index, first in enumerate(every)
    ]


def compare(runs: dict[str, list[float]], resumed: dict[str, list[float]]) -> list[Sample]:
    """One row for each pair and form."""
    reference = runs["plain|file"][STEPS:]
    rows: list[Sample] = []
    for key, found in resumed.items():
        first, second, form = key.split("|")
        own = resumed[f"{first}|{second}|file"] if first != second else runs[f"{second}|file"][STEPS:]
        difference = max(abs(mine - other) / abs(other) for mine, other in zip(found, reference, strict=True))
        rows.append(
            {
                "saved_under": first,
                "resumed_under": second,
                "form": form,
                "largest_relative_difference": difference,
                "is_same_to_the_bit": found == own,
                "agrees": difference <= TOLERANCE and found == own,
            }
        )
    return rows


def main(arguments: Iterable[str] | None = None) -> int:
    """Run everything, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strides", type=int, nargs="*", default=[1, 4, 7, 10, 13], help="which other plans resume")
    given = parser.parse_args(None if arguments is None else list(arguments))
    pairs = pairs_of(LAYOUTS, given.strides)
    runs: dict[str, list[float]] = {}
    resumed: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for work, results in (("save", runs), ("resume", resumed)):
            for world in WORLDS:
                given_pairs = [folder, work, json.dumps(pairs)]
                results.update(run_module(_WORKER, given_pairs, processes=world, timeout_seconds=3600.0))
                print(f"{work}, {world} processes: {len(results)} runs", flush=True)
    rows = compare(runs, resumed)
    failing = [row for row in rows if not row["agrees"]]
    for row in failing:
        print(row)
    most = max(float(row["largest_relative_difference"] or 0.0) for row in rows)
    notes = (
        f"{len(pairs)} ordered pairs of {len(LAYOUTS)} plans, each from a file and from a directory: "
        f"{len(rows) - len(failing)} of {len(rows)} agree; the largest relative difference is {most:.1e}. The same to "
        "the bit: with the plan's own run where it resumes itself, else with what resumes from a file."
    )
    print(notes, write_record(make_record("resume-matrix", rows, notes=notes)))
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
