"""Measure this machine, several times, and record the best rates and how far they vary.

python -m benchmarks.hardware.profile --processes 2 --repeats 3
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.hardware import detect, measure_profile, measuring_groups


def worker(out: Path, budget_seconds: float) -> None:
    """Measure, in one of several processes."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    cluster = detect(dist.get_world_size(), 1, device.type)
    dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if cuda else [])]
    with measuring_groups(cluster) as groups:
        profile = measure_profile(
            cluster=cluster, device=device, dtypes=dtypes, groups=groups, budget_seconds=budget_seconds
        )
    if dist.get_rank() == 0:
        out.write_text(json.dumps(dataclasses.asdict(profile)))
    dist.destroy_process_group()


def rows(profiles: list[dict[str, Any]]) -> list[Sample]:
    """One sample per figure: the best of the profiles, as the least disturbed, and their range over their median."""
    figures: dict[tuple[str, str], list[float]] = {}

    def add(name: str, unit: str, value: float) -> None:
        figures.setdefault((name, unit), []).append(value)

    for profile in profiles:
        for rate in profile["compute"]:
            add(f"matrix products in {rate['dtype']}", "flops_per_second", max(rate["flops_per_second"]))
        add("memory", "bytes_per_second", profile["memory_bytes_per_second"])
        add("launch of an operator", "latency_seconds", profile["operator_seconds"])
        for rate in profile["rates"]:
            for direction in ("forward", "backward"):
                for size, speed in zip(rate["bytes"], rate[f"{direction}_bytes_per_second"], strict=True):
                    add(f"{rate['kind']} of {size:.0f} bytes, {direction}", "bytes_per_second", speed)
        for rate in profile["kernels"]:
            for direction in ("forward", "backward"):
                name = f"{rate['kind']} in {rate['dtype']}, {direction}"
                add(name, "flops_per_second", rate[f"{direction}_flops_per_second"])
        for cost in profile["collectives"]:
            name = f"{cost['operation']} among {cost['group_size']}"
            add(name, "bytes_per_second", cost["bytes_per_second"])
            add(name, "latency_seconds", cost["latency_seconds"])
    samples: list[Sample] = []
    for (name, unit), values in figures.items():
        median = statistics.median(values)
        spread = (max(values) - min(values)) / median if median else 0.0
        best = min(values) if unit == "latency_seconds" else max(values)
        samples.append({"figure": name, unit: best, "spread": spread})
    return samples


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--processes", type=int, default=max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        worker(options.out, options.budget_seconds)
        return
    arguments = ["--budget-seconds", str(options.budget_seconds)]
    profiles = [
        run_module("benchmarks.hardware.profile", arguments, processes=options.processes)
        for _ in range(options.repeats)
    ]
    record = make_record("profile", rows(profiles), notes=f"{options.processes} processes, {options.repeats} repeats.")
    print(write_record(record), file=sys.stderr)


if __name__ == "__main__":
    main()
