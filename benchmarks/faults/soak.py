"""Fit after fit in the same two processes for hours: what grows, and whether training goes on where it stopped.

A small language model is trained under ZeRO 3, a pipeline with everything offloaded, ZeRO 1 and the planner's own
choice in turn. Each fit resumes from the last checkpoint of the one before, saved as a file, a directory or a directory
while training goes on; checkpoints rotate; the model is validated and tested in and outside of fits. After a fit each
rank counts its resident memory, threads, open files, objects, process groups and files. A run that goes wrong, or a
count that grows after the first tenth of the fits, makes the exit status 1. SIGTERM or Ctrl-C ends it early, with a
record of what ran.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.soak_run import FORMS, PLANS, STOP
from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record

COUNTS = ("threads", "descriptors", "groups", "checkpoints", "temporary_files")
"""What may not grow at all: what is still being closed when it is counted is not there after the next fit."""

MOST_GROWTH = 0.03
"""By how much of itself resident memory may grow in the whole run."""

PARTS = 10
"""The first part is warm-up; the second is compared with the last."""

Fits = Sequence[dict[str, Any]]


def parts_of(fits: Fits) -> list[Fits]:
    """Ten parts of equal length, as nearly as can be."""
    edges = [len(fits) * index // PARTS for index in range(PARTS + 1)]
    return [fits[first:last] for first, last in pairwise(edges)]


def median(fits: Fits, name: str) -> float:
    """Median of what fits have counted."""
    return float(statistics.median(found[name] for found in fits))


def rows_of(rank: int, fits: Fits) -> list[Sample]:
    """A row for each part of a rank's fits: medians of bytes, seconds and objects, the most of other counts."""
    return [
        {
            "rank": rank,
            "part": number,
            "fits": len(part),
            "fit_seconds": median(part, "fit_seconds"),
            "resident_bytes": median(part, "resident_bytes"),
            "objects": median(part, "objects"),
            **{name: max(found[name] for found in part) for name in COUNTS},
            "last_step": part[-1]["step"],
            "validation_loss": part[-1]["val"],
        }
        for number, part in enumerate(parts_of(fits))
    ]


def growth_of(fits: Fits) -> tuple[float, float]:
    """Bytes by which memory grows with a fit (least squares), and from the second part to the last (medians)."""
    parts = parts_of(fits)
    warm = fits[len(parts[0]) :]
    slope = np.polyfit([found["fit"] for found in warm], [found["resident_bytes"] for found in warm], 1)[0]
    return float(slope), median(parts[-1], "resident_bytes") - median(parts[1], "resident_bytes")


def faults_of(rank: int, fits: Fits) -> list[str]:
    """What grows that should not."""
    parts = parts_of(fits)
    _, growth = growth_of(fits)
    found = [
        f"rank {rank}: {name} grow from {before} to {after}"
        for name in COUNTS
        if (after := min(fit[name] for fit in parts[-1])) > (before := min(fit[name] for fit in parts[1]))
    ]
    if growth > MOST_GROWTH * median(parts[1], "resident_bytes"):
        found.append(f"rank {rank}: resident memory grows by {growth / 2**20:.1f} MiB")
    return found


def notes_of(ranks: Sequence[Fits], faults: Sequence[str], seconds: float, how: str) -> str:
    """What was seen, in words."""
    growths = [growth_of(fits) for fits in ranks]
    memory = "; ".join(
        f"rank {rank} {total / 2**20:+.1f} MiB ({slope:+.0f} bytes a fit)"
        for rank, (slope, total) in enumerate(growths)
    )
    return (
        f"{len(ranks[0])} fits in {seconds:.0f} s, {how}; plans {'; '.join(PLANS)}; checkpoints as {'; '.join(FORMS)}. "
        "Every fit began at the step and with the validation loss where the one before had stopped. Rows: tenths of "
        "the fits, the first of them warm-up; medians of seconds, resident memory and objects, and the most of what "
        f"else is counted, the least compared. Resident memory from the second tenth to the last: {memory}; "
        f"{MOST_GROWTH:.0%} is allowed. " + (f"Faults: {'; '.join(faults)}." if faults else "Nothing else grows.")
    )


def read_fits(path: Path) -> Fits:
    """Fits that a rank has finished."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def run(folder: Path, seconds: float) -> str:
    """Run both ranks, and say how it ended."""
    (folder / "temporary").mkdir()

    def stop(*_: object) -> None:
        (folder / STOP).touch()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        run_module(
            "benchmarks.faults.soak_run",
            [str(folder), "--seconds", str(seconds)],
            processes=2,
            timeout_seconds=seconds + 600.0,
            environment={"TMPDIR": str(folder / "temporary")},
        )
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return f"ended by an error: {str(error).splitlines()[-1]}"
    return "stopped early" if (folder / STOP).exists() else "to the end"


def main(arguments: Iterable[str] | None = None) -> int:
    """Run, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200.0, help="how long to begin fits")
    given = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        how = run(folder, given.seconds)
        ranks = [read_fits(folder / f"rank{rank}.jsonl") for rank in range(2)]
        ranks = [fits[: min(map(len, ranks))] for fits in ranks]
    if len(ranks[0]) < 2 * PARTS:
        print(f"{len(ranks[0])} fits, {how}: too few to say what grows", file=sys.stderr)
        return 1
    faults = [text for rank, fits in enumerate(ranks) for text in faults_of(rank, fits)]
    samples = [row for rank, fits in enumerate(ranks) for row in rows_of(rank, fits)]
    seconds = sum(fit["fit_seconds"] for fit in ranks[0])
    notes = notes_of(ranks, faults, seconds, how)
    print(notes, write_record(make_record("soak", samples, notes=notes)), sep="\n")
    return 1 if faults or how.startswith("ended") else 0


if __name__ == "__main__":
    sys.exit(main())
