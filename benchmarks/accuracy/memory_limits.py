"""Does a lower memory limit give another plan, and does training stay under every limit?

For 1, 2 and 4 processes the limit is lowered by a quarter at a time, from what the unlimited plan takes, until nothing
fits. A row is one limit: the plan that was chosen, and the peak of the stage that needs most.

    python -m benchmarks.accuracy.memory_limits
"""

import argparse
from typing import Any

from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record


def sample_of(processes: int, entry: dict[str, Any]) -> Sample:
    """One row."""
    if "error" in entry:
        return {"processes": processes, "limit_bytes": entry["limit"], "plan": "none fits"}
    measured = entry["measured_bytes"]
    most = measured.index(max(measured))
    stages = entry["plan"]["stages"]
    layers = sum(stage["layers"][1] - stage["layers"][0] for stage in stages)
    recomputed = sum(stage["checkpointed_layers"] for stage in stages)
    predicted = entry["predicted_bytes"][most]
    return {
        "processes": processes,
        "limit_bytes": entry["limit"],
        "plan": f"{len(stages)} stages, {entry['plan']['num_microbatches']} microbatches, "
        f"ZeRO {max(stage['zero_stage'] for stage in stages)}, {recomputed} of {layers} layers recomputed",
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": measured[most],
        "memory_error": (predicted - measured[most]) / measured[most],
    }


def main() -> None:
    """Run for every number of processes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    samples = []
    for processes in options.processes:
        run = run_module("benchmarks.accuracy.limited", [], processes=processes)
        for entry in run["entries"]:
            samples.append(sample_of(processes, entry))
            print(samples[-1], flush=True)
    over = [
        sample
        for sample in samples
        if sample["limit_bytes"] and float(sample.get("measured_peak_bytes") or 0) > float(sample["limit_bytes"])
    ]
    notes = f"{len(samples)} limits; training went over {len(over)} of them."
    print(notes, write_record(make_record("memory-limits", samples, notes=notes)), sep="\n")


if __name__ == "__main__":
    main()
