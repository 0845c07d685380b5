"""Step time and peak memory of a dozen plans, predicted and then measured by running them.

Predictions come first, from measurements of the machine and of single layers; no plan's run corrects them. An error is
``(predicted - measured) / measured``. The rank correlation (Kendall's tau over pairs of plans) says whether the cost
model orders plans rightly, which is what choosing among them needs.

    python -m benchmarks.accuracy.predicted_vs_measured
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record
from benchmarks.workload import add_size_arguments, size_arguments

PROCESSES = 2


def sample_of(name: str, report: dict[str, Any]) -> Sample:
    """One row: time, and the memory of the stage that needs most."""
    stage = max(report["stages"], key=lambda stage: stage["measured_bytes"])
    predicted, measured = report["predicted_step_seconds"], report["measured_step_seconds"]
    return {
        "plan": name,
        "predicted_step_seconds": predicted,
        "measured_step_seconds": measured,
        "time_error": (predicted - measured) / measured,
        "predicted_peak_bytes": stage["predicted_bytes"],
        "measured_peak_bytes": stage["measured_bytes"],
        "memory_error": (stage["predicted_bytes"] - stage["measured_bytes"]) / stage["measured_bytes"],
    }


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of pairs in the same order minus share of those in the opposite one."""
    pairs = list(itertools.combinations(range(len(first)), 2))
    signs = [(first[i] - first[j]) * (second[i] - second[j]) for i, j in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(pairs)


def summary(samples: Sequence[Sample]) -> str:
    """The errors and the order in one sentence."""

    def column(name: str) -> list[float]:
        return [float(sample[name] or 0.0) for sample in samples]

    time, memory = ([abs(error) for error in column(f"{what}_error")] for what in ("time", "memory"))
    tau = kendall(column("predicted_step_seconds"), column("measured_step_seconds"))
    return (
        f"{len(samples)} plans: mean absolute error of time {statistics.mean(time):.1%} (largest {max(time):.1%}), of "
        f"peak memory {statistics.mean(memory):.1%} (largest {max(memory):.1%}); rank correlation of time {tau:.2f}."
    )


def main() -> None:
    """Predict, run every plan, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    add_size_arguments(parser)
    options = parser.parse_args()
    sizes = size_arguments(options)
    plans = run_module("benchmarks.accuracy.predict", sizes, processes=PROCESSES)
    samples = []
    with tempfile.TemporaryDirectory() as directory:
        for name, plan in plans.items():
            path = Path(directory) / "plan.json"
            path.write_text(json.dumps(plan))
            arguments = ["--strategy", "mist", "--plan", str(path), "--steps", str(options.steps), *sizes]
            run = run_module("benchmarks.workload", arguments, processes=PROCESSES)
            samples.append(sample_of(name, run["report"]))
            print(samples[-1], flush=True)
    print(summary(samples), write_record(make_record("accuracy", samples, notes=summary(samples))), sep="\n")


if __name__ == "__main__":
    main()
