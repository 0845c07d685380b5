"""How long the command takes from being typed to its answer, imports included.

OMP_NUM_THREADS=1 python -m benchmarks.planner.command_times

Each run is ``lightning-mist plan --json`` for a preset, with everything else as it is by default.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from time import perf_counter

from benchmarks.planner.search_times import CASES, Case
from benchmarks.record import ROOT, Sample, make_record, write_record

LIMIT_SECONDS = 3.0
"""What a preset on one node may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the command.

    Attributes:
        seconds: From its start to its end.
        processor_seconds: What its process and those that it started computed.
        answer: What it printed.
    """

    seconds: float
    processor_seconds: float
    answer: dict[str, object]


def command_of(case: Case) -> list[str]:
    """What to type for a case."""
    asked = {
        "model": case.model,
        "cluster": case.cluster,
        "global-batch-size": case.batch,
        "seq-len": case.length,
        "precision": "bf16-true",
    }
    options = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "lightning_mist.cli", "plan", *options, "--json"]


def run_once(command: list[str]) -> Run:
    """Run a command that prints JSON.

    Raises:
        RuntimeError: If it fails.
    """
    started = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        assert process.stdout is not None
        shown = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return Run(
        seconds=seconds,
        processor_seconds=used.ru_utime + used.ru_stime,
        answer=json.loads(shown),
    )


def sample_of(case: Case, runs: list[Run]) -> Sample:
    """Medians over the runs of a case."""
    return {
        "model": case.model,
        "cluster": case.cluster,
        "batch": case.batch,
        "command_seconds": statistics.median(run.seconds for run in runs),
        "processor_seconds": statistics.median(run.processor_seconds for run in runs),
        "limit_seconds": LIMIT_SECONDS if case.cluster.startswith("1x") else None,
        "stages": len(runs[0].answer["plan"]["stages"]),  # type: ignore[index]
    }


def main() -> None:
    """Run the cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES], help="only these")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    samples = []
    for case in CASES:
        if case.model in options.models:
            samples.append(sample_of(case, [run_once(command_of(case)) for _ in range(options.repeats)]))
            print(samples[-1], flush=True)
    notes = f"Medians of {options.repeats} runs; everything but bf16-true as by default."
    if not options.dry_run:
        print(write_record(make_record("planner-command", samples, notes=notes)))


if __name__ == "__main__":
    main()
