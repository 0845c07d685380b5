"""Steps per second of mist with a plain data-parallel plan, against Lightning's DDP.

Machines drift: their clocks, their neighbours. So runs alternate, DDP and mist then mist and DDP, and each pair gives
one ratio of medians; reported are the median ratio and the range of them.

    python -m benchmarks.throughput.against_ddp --pairs 5 --processes 2
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.launch import run_module
from benchmarks.plans import data_parallel
from benchmarks.record import Sample, make_record, write_record
from benchmarks.workload import add_size_arguments, size_arguments
from lightning_mist.plan import save


def main() -> None:
    """Run the pairs, print the ratio, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    add_size_arguments(parser)
    options = parser.parse_args()
    common = ["--steps", str(options.steps), *size_arguments(options)]
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as directory:
        plan = Path(directory) / "plan.json"
        save(data_parallel(options.layers, options.processes, options.batch_size), plan)
        commands = {"ddp": ["--strategy", "ddp"], "mist": ["--strategy", "mist", "--plan", str(plan)]}
        for pair in range(options.pairs):
            seconds, losses = {}, {}
            for name in sorted(commands, reverse=pair % 2 == 1):
                run = run_module("benchmarks.workload", [*commands[name], *common], processes=options.processes)
                seconds[name], losses[name] = statistics.median(run["step_seconds"]), run["losses"]
            difference = max(abs(a - b) for a, b in zip(losses["ddp"], losses["mist"], strict=True))
            sample: Sample = {
                "pair": pair,
                "ddp_step_seconds": seconds["ddp"],
                "mist_step_seconds": seconds["mist"],
                "ratio": seconds["mist"] / seconds["ddp"],
                "largest_loss_difference": difference,
            }
            samples.append(sample)
            print(sample, flush=True)
    ratios = [float(sample["ratio"] or 0) for sample in samples]
    text = f"mist over DDP: {statistics.median(ratios):.3f}, range {min(ratios):.3f} to {max(ratios):.3f}"
    record = make_record("throughput-against-ddp", samples, notes=f"{text} ({options.processes} processes).")
    print(text, write_record(record), sep="\n")


if __name__ == "__main__":
    main()
