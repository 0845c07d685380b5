"""Does a model train whose parameters alone exceed the memory that each process may use?

A small GPT with momentum SGD on 4 CPU processes, each limited to 95% of the bytes of all parameters; parameters,
gradients and momentum together take three times those. The module is built without values, or with values in host
memory; the planner may choose from everything, from pipelines of one device per stage, or from ZeRO-3 alone. Peaks are
those of the stage that needs most, metered tensor by tensor in a real step.

    python -m benchmarks.accuracy.larger_than_memory
"""

import argparse
from statistics import mean
from typing import Any

from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record

CASES = (("empty", "everything"), ("ordinary", "everything"), ("empty", "pipelines"), ("empty", "ZeRO-3"))

_SMOOTHED = 5
"""Steps over which losses are averaged at the start and at the end, each on a batch of its own."""


def sample_of(built: str, search: str, run: dict[str, Any]) -> Sample:
    """One row."""
    measured = run["measured_bytes"]
    most = measured.index(max(measured))
    predicted = run["predicted_bytes"][most]
    stages = run["plan"]["stages"]
    return {
        "built": "without values" if built == "empty" else "with values",
        "search": search,
        "plan": f"{len(stages)} stages, {run['plan']['num_microbatches']} microbatches, "
        f"ZeRO {max(stage['zero_stage'] for stage in stages)}, "
        f"{sum(stage['checkpointed_layers'] for stage in stages)} layers recomputed",
        "all_parameters_bytes": run["all_bytes"],
        "limit_bytes": run["limit"],
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": measured[most],
        "memory_error": (predicted - measured[most]) / measured[most],
        "first_loss": mean(run["losses"][:_SMOOTHED]),
        "last_loss": mean(run["losses"][-_SMOOTHED:]),
    }


def main() -> None:
    """Run every case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    samples = []
    for built, search in CASES:
        arguments = ["--built", built, "--search", search]
        run = run_module("benchmarks.accuracy.large", arguments, processes=options.processes)
        samples.append(sample_of(built, search, run))
        print(samples[-1], flush=True)
    over = sum(float(sample["measured_peak_bytes"] or 0) > float(sample["limit_bytes"] or 0) for sample in samples)
    notes = f"{len(samples)} runs of {options.processes} processes; {over} went over the limit."
    print(notes, write_record(make_record("larger-than-memory", samples, notes=notes)), sep="\n")


if __name__ == "__main__":
    main()
