"""Seconds from a model's name to a plan for a cluster that is not at hand: how layers split, tracing, searching.

python -m benchmarks.planner.tuning

This is what any module takes. Presets are described by their sizes instead, which takes a moment.
"""

import argparse
import statistics
from time import perf_counter

import torch

from benchmarks.record import Sample, make_record, write_record
from lightning_mist.hardware import parse_cluster
from lightning_mist.hardware.catalog.devices import capability_of
from lightning_mist.model import derive_splits, device_operators, map_module, trace_model
from lightning_mist.model.sources.text_sources import open_model
from lightning_mist.plan import SearchSpace
from lightning_mist.tensors import slice_rows
from lightning_mist.tuner import degrees_to_try, tune

CASES = [
    ("gpt3-1.3b", "1x2xL4", 16),
    ("llama-1.3b", "1x8xL4", 64),
    ("llama-7b", "1x8xA100-40", 64),
    ("gpt3-22b", "4x8xL4", 512),
]
"""Preset, cluster, and rows of a batch over all devices."""

PRECISION, SEQUENCE_LENGTH = "bf16-true", 2048


def measure(name: str, cluster_text: str, global_batch_size: int) -> Sample:
    """Plan once."""
    cluster = parse_cluster(cluster_text)
    rows, search = max(2, global_batch_size // cluster.world_size), SearchSpace()
    started = perf_counter()
    source = open_model(name, batch_rows=rows, sequence_length=SEQUENCE_LENGTH, precision=PRECISION)
    found = map_module(source.module, source.call, source.batch, second_batch=slice_rows(source.batch, 0, rows - 1))
    mapped = perf_counter()
    degrees = degrees_to_try(search, cluster.devices_per_node)
    found = derive_splits(source.module, source.call, source.batch, found, degrees)
    derived = perf_counter()
    spec = trace_model(
        source.module,
        source.batch,
        call=source.call,
        module_map=found,
        optimizer=torch.optim.AdamW,
        precision=PRECISION,
        device_kind=device_operators(cluster.device.kind, capability=capability_of(cluster.device.name)),
    )
    traced = perf_counter()
    result = tune(spec, cluster, global_batch_size=global_batch_size, search=search)
    return {
        "model": name,
        "cluster": cluster_text,
        "global_batch_size": global_batch_size,
        "split_seconds": derived - mapped,
        "trace_seconds": traced - derived + mapped - started,
        "search_seconds": perf_counter() - traced,
        "candidates": result.stats.candidates,
        "status": result.status,
        "gap": result.gap,
        "stages": result.plan.num_stages,
    }


def main() -> None:
    """Run every case a few times and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=[case[0] for case in CASES], help="only these")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    samples = []
    for case in CASES:
        if case[0] not in options.models:
            continue
        runs = [measure(*case) for _ in range(options.repeats)]
        sample = dict(runs[0])
        for name in ("split_seconds", "trace_seconds", "search_seconds"):
            sample[name] = statistics.median(float(run[name] or 0.0) for run in runs)
        samples.append(sample)
        print(sample, flush=True)
    notes = f"Medians of {options.repeats} runs; {PRECISION}, {SEQUENCE_LENGTH} tokens per row, AdamW."
    if not options.dry_run:
        print(write_record(make_record("planning", samples, notes=notes)))


if __name__ == "__main__":
    main()
