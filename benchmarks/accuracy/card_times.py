"""Steps of models on one card, by plans of several kinds: predicted before any of them runs, then measured.

python -m benchmarks.accuracy.card_times
python -m benchmarks.accuracy.card_times --sizes llama-1.1b --rows 4
"""

import argparse
import statistics
import sys

import torch

from benchmarks.accuracy.card_times_run import SIZES
from benchmarks.card import NO_CARD
from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record


def summary(samples: list[Sample]) -> str:
    """Mean and largest errors of time and memory."""
    parts = []
    for what, figure in (("step", "step_seconds"), ("memory of tensors", "bytes"), ("device", "device_bytes")):
        errors = [
            float(sample[f"predicted_{figure}"] or 0.0) / float(measured) - 1.0
            for sample in samples
            if (measured := sample.get(f"measured_{figure}")) and sample.get(f"predicted_{figure}")
        ]
        if errors:
            mean, largest = statistics.mean(map(abs, errors)), max(errors, key=abs)
            parts.append(f"{what}: mean absolute error {mean:.1%}, largest {largest:+.1%}, of {len(errors)} plans")
    return "; ".join(parts)


def main() -> None:
    """Run the models, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["gpt2-large", "llama-1.1b"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one model")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(NO_CARD)
    samples: list[Sample] = []
    for size in options.sizes:
        arguments = ["--size", size, "--rows", str(options.rows)]
        module = "benchmarks.accuracy.card_times_run"
        samples += run_module(module, arguments, processes=1, timeout_seconds=options.timeout)["rows"]
        print(summary(samples), flush=True)
    notes = f"bf16-mixed, {options.rows} rows of 1024 tokens. {summary(samples)}."
    print(write_record(make_record("card-times", samples, notes=notes)))


if __name__ == "__main__":
    main()
