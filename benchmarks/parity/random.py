"""Random plans on random models against a single process: losses and gradients summed over two batches of every rank.

A plan is drawn from the seed: groups of devices with data- and tensor-parallel degrees, ZeRO stages (over all ranks or
within groups), sequence parallelism and recomputed layers of their own, uneven layers, schedule, chunks and number of
microbatches; of tensor parallelism only what the model allows. Half of them offload, and are also held against curves
of twenty steps. The record has one line per model. A plan that differs is printed with its seed, the plan and the first
parameter that differs, and the exit status is 1.

All ranks run in this process, in double precision.
"""

import argparse
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd, lcm
from time import perf_counter

import torch

from benchmarks.parity.cell import Outcome, attempt, compare_curves, compare_gradients, make_batches, subject
from benchmarks.parity.plans import Group, Layout
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.plan import ModuleMap, OffloadRatios

MODELS = (
    "gpt2", "gpt2_even", "llama_even", "bert", "vit", "t5", "nano_even", "lora_llama", "encoder", "plain", "skips",
    "sometimes",
)  # fmt: skip

MOST_RANKS = 8


def draw(rng: random.Random, module_map: ModuleMap) -> tuple[Layout, int]:
    """A layout that a model allows, and rows of a batch that it can cut.

    Args:
        rng: Random numbers.
        module_map: Where the model can be cut and split.
    """
    layers = len(module_map.blocks)
    count = rng.choice([1, 1, 2, 2, 2, 3, min(4, layers)])
    schedule = rng.choice(["1f1b", "1f1b", "gpipe", "zb-h1", "interleaved-1f1b"]) if count > 1 else "1f1b"
    chunks = 2 if schedule == "interleaved-1f1b" and layers >= 2 * count else 1
    if chunks == 1 and schedule == "interleaved-1f1b":
        schedule = "1f1b"
    while True:
        groups = tuple(_group(rng, module_map) for _ in range(count))
        if rng.random() < 0.4:
            groups = groups[:1] * count
        if sum(group.ranks for group in groups) <= MOST_RANKS and not _shares_both_ways(groups):
            break
    layout = Layout(
        groups=groups,
        parts=rng.choice([1, 1, 2, 3]),
        schedule=schedule,
        chunks=chunks,
        uneven=rng.random() < 0.3,
    )
    rows = _rows(layout) * rng.choice([1, 1, 2])
    if rng.random() < 0.5:
        layout = replace(layout, groups=tuple(replace(group, offload=_offload(rng)) for group in groups))
    return layout, rows


def _offload(rng: random.Random) -> OffloadRatios:
    p, g, o, a = (rng.choice([0.0, 0.3, 0.7, 1.0]) for _ in range(4))
    return OffloadRatios(parameters=p, gradients=g, optimizer=o, activations=a)


def _group(rng: random.Random, module_map: ModuleMap) -> Group:
    tp = rng.choice([1, *(split.degree for split in module_map.splits if split.degree <= MOST_RANKS // 2)])
    cp = rng.choice([1, *(split.degree for split in module_map.contexts)]) if tp == 1 else 1
    dp = rng.choice([1, 2, 3, 4])
    zero = rng.choice([0, 1, 2, 3]) if dp * cp > 1 else 0
    allows_sequence = tp > 1 and bool(module_map.split(tp).sequence)
    return Group(
        dp=dp,
        tp=tp,
        cp=cp,
        zero=zero,
        shard=rng.choice([None, 2]) if dp * cp == 4 and zero else None,
        checkpointed=rng.choice([0, 0, 1, 2]),
        sequence=allows_sequence and rng.random() < 0.5,
    )


def _shares_both_ways(groups: Sequence[Group]) -> bool:
    return any(group.tp > 1 for group in groups) and any(group.cp > 1 for group in groups)


def _rows(layout: Layout) -> int:
    """The least rows that every group can cut as the layout says."""
    world = sum(group.ranks for group in layout.groups)
    replicas = gcd(*(group.dp for group in layout.groups))
    owners = world // replicas
    count = lcm(*(owners // gcd(owners, group.dp // replicas) for group in layout.groups))
    if layout.chunks > 1:
        count = lcm(count, len(layout.groups))
    return lcm(*(layout.parts * count * group.dp // world for group in layout.groups))


FEATURES = {
    "stages": lambda layout: layout.num_stages > 1,
    "tensor parallel": lambda layout: any(group.tp > 1 for group in layout.groups),
    "context parallel": lambda layout: any(group.cp > 1 for group in layout.groups),
    "sequence parallel": lambda layout: any(group.sequence for group in layout.groups),
    "ZeRO 1": lambda layout: any(group.zero == 1 for group in layout.groups),
    "ZeRO 2": lambda layout: any(group.zero == 2 for group in layout.groups),
    "ZeRO 3": lambda layout: any(group.zero == 3 for group in layout.groups),
    "HSDP": lambda layout: any(group.shard for group in layout.groups),
    "groups differ": lambda layout: len(set(layout.groups)) > 1,
    "offload": lambda layout: any(group.offload.any for group in layout.groups),
    "interleaved": lambda layout: layout.chunks > 1,
    "zero bubble": lambda layout: layout.schedule == "zb-h1",
}
"""What a layout may have, counted in the record."""


def run(seed: int, models: tuple[str, ...]) -> tuple[str, Layout, Outcome]:
    """One plan on one model."""
    rng = random.Random(seed)
    name = models[seed % len(models)]
    model = subject(name, torch.float64)
    layout, rows = draw(rng, model.module_map)
    drawn = replace(model, batches=make_batches(name, torch.float64, seed=seed, rows=rows))
    found = attempt(compare_gradients, drawn, layout, rows)
    if not (found.differing or found.refused) and any(group.offload.any for group in layout.groups):
        # What is offloaded is updated in another way too.
        curves = attempt(compare_curves, drawn, layout, rows)
        found = curves if curves.differing else found
    return name, layout, found


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the seeds and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many plans")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(None if arguments is None else list(arguments))
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    found: dict[str, list[tuple[Layout, Outcome]]] = defaultdict(list)
    started, differing = perf_counter(), 0
    for seed in range(options.first, options.first + options.seeds):
        name, layout, outcome = run(seed, tuple(options.models))
        found[name].append((layout, outcome))
        differing += bool(outcome.differing)
        detail = outcome.differing or outcome.refused
        print(f"seed {seed}, {perf_counter() - started:.0f} s: {name}: {outcome.text} {detail}".rstrip(), flush=True)
        if outcome.differing:
            print(f"  {layout}", flush=True)
    rows = [summary(name, found[name]) for name in options.models if found[name]]
    print(f"{options.seeds} plans, {differing} differ")
    if not options.no_record:
        notes = "Largest relative difference from a single process of losses and of gradients summed over two batches."
        write_record(make_record("parity-random", rows, notes=notes))
    return 1 if differing else 0


def summary(name: str, found: list[tuple[Layout, Outcome]]) -> Sample:
    """One model's line in the record."""
    ran = [(layout, outcome) for layout, outcome in found if not outcome.refused]
    worst = max((max(outcome.loss, outcome.gradient) for _, outcome in ran), default=0.0)
    return {
        "model": name,
        "plans": len(ran),
        **{feature: sum(has(layout) for layout, _ in ran) for feature, has in FEATURES.items()},
        "refused": len(found) - len(ran),
        "differing": sum(bool(outcome.differing) for _, outcome in ran),
        "largest difference": f"{worst:.1e}",
    }


if __name__ == "__main__":
    sys.exit(main())
