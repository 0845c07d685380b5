"""How many stages a second the memory model tells the peak of: many candidates at once, and one after another.

python -m benchmarks.planner.memory_rate
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from time import process_time

import numpy as np
import torch

from benchmarks.record import Sample, make_record, write_record
from lightning_mist.cost.inputs.candidates import OffloadCandidates, StageCandidates, StageSlot
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.model import ModelSpec, trace_model
from lightning_mist.model.sources.text_sources import open_model

MODELS = ("gpt3-1.3b", "llama-7b")
PRECISION, SEQUENCE_LENGTH, BATCH_ROWS = "bf16-true", 2048, 16

SLOTS = {
    "one device": {"num_stages": 1, "stage_index": 0, "num_microbatches": 4, "data_parallel_degree": 1},
    "first of 4, 8 ranks": {"num_stages": 4, "stage_index": 0, "num_microbatches": 16, "data_parallel_degree": 8},
    "second of 4, zero bubble": {
        "num_stages": 4,
        "stage_index": 1,
        "num_microbatches": 16,
        "data_parallel_degree": 4,
        "schedule": "zb-h1",
    },
}
"""Places in a pipeline whose candidates are looked at."""


def candidates_of(layers: int, slot: StageSlot, count: int) -> StageCandidates:
    """As many choices of layers, recomputation and ZeRO stage as wanted, repeated if there are fewer."""
    zero = range(4) if slot.data_parallel_degree > 1 else (0,)
    starts = (0,) if slot.stage_index == 0 else range(1, layers)
    ends = (layers,) if slot.num_stages == 1 else range(1, layers)
    chosen = [
        (start, end, recomputed, level)
        for start, end in product(starts, ends)
        if start < end
        for recomputed, level in product(range(end - start + 1), zero)
    ]
    start, end, recomputed, level = (np.resize(column, count) for column in np.array(chosen).T)
    return StageCandidates(start_K=start, end_K=end, checkpointed_K=recomputed, zero_stage_K=level)


def ratios_of(count: int) -> OffloadCandidates:
    """Every mixture of some parts of each kind of state, in turn."""
    parts = np.array(list(product((0.0, 0.5), (0.0, 0.5), (0.0, 0.5, 1.0), (0.0, 0.25))))
    # Inputs of recomputed layers move as what other layers keep does.
    return OffloadCandidates.of_kinds(np.resize(parts, (count, parts.shape[1]))[:, [0, 1, 2, 3, 3]])


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of the processor for a call, so that other work does not count, after one that is left out."""
    call()
    taken = []
    for _ in range(repeats):
        started = process_time()
        call()
        taken.append(process_time() - started)
    return statistics.median(taken)


def measure(spec: ModelSpec, name: str, options: argparse.Namespace) -> list[Sample]:
    """Every slot, with and without offload."""
    model, samples = MemoryModel(spec), []
    for place, offloads in product(SLOTS, (False, True)):
        slot = StageSlot(rows=1, batch_rows=4, **SLOTS[place])  # type: ignore[arg-type]
        many = candidates_of(spec.num_layers, slot, options.candidates)
        if offloads:
            many = replace(many, offload=ratios_of(len(many)))
        one = many.take(np.arange(1))
        together = seconds(lambda slot=slot, many=many: model.peaks(slot, many), options.repeats)  # type: ignore[misc]
        alone = seconds(lambda slot=slot, one=one: model.peaks(slot, one), 100)  # type: ignore[misc]
        samples.append(
            {
                "model": name,
                "slot": place,
                "offload": offloads,
                "candidates": len(many),
                "candidates_per_second": len(many) / together,
                "one_seconds": alone,
            }
        )
        print(samples[-1], flush=True)
    return samples


def traced(name: str) -> ModelSpec:
    """A preset, traced."""
    source = open_model(name, batch_rows=BATCH_ROWS, sequence_length=SEQUENCE_LENGTH, precision=PRECISION)
    return trace_model(source.module, source.batch, call=source.call, optimizer=torch.optim.AdamW, precision=PRECISION)


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    samples = [sample for name in options.models for sample in measure(traced(name), name, options)]
    notes = (
        f"Medians of {options.repeats} runs over arrays of {options.candidates} candidates and of 100 runs of a single "
        f"one, in seconds of the processor; {PRECISION}, {SEQUENCE_LENGTH} tokens per row, AdamW, one thread."
    )
    print(write_record(make_record("memory-rate", samples, notes=notes)))


if __name__ == "__main__":
    main()
