"""The plans of the parity table, by name."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm

from lightning_mist.plan import Checkpointing, CheckpointingKind, OffloadRatios, Plan, StageMesh, StagePlan, ZeroStage

ROWS = 12
"""Rows of every rank's batch: 2, 3, 4 and 6 parts of one batch have the same number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that hold a part of the model: degrees, ZeRO stage, what is recomputed of its first layers and moved.

    Attributes:
        shard: Ranks that ZeRO shards over, if not all with the same parameters.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    zero: int = 0
    shard: int | None = None
    checkpointed: int = 0
    kind: CheckpointingKind = "full"
    sequence: bool = False
    offload: OffloadRatios = field(default_factory=OffloadRatios)

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan for any number of layers.

    Attributes:
        groups: Groups of devices in the order of the model.
        parts: How many times more microbatches than there must be at least.
        schedule: Name of the schedule.
        chunks: Stages that each group runs, one after another; more than one under ``"interleaved-1f1b"``.
        uneven: Whether the first stage gets as many layers as possible.
        loaders: Batches that are loaded at once, if not one by every rank.
        tail: Chunks behind the last layer, of rows, or of tokens if ``cuts_tokens``.
        whole: Whether ZeRO deals out whole parameters, as to optimizers that look at more than one entry at a time.
    """

    groups: tuple[Group, ...] = field(default_factory=lambda: (Group(),))
    parts: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    uneven: bool = False
    loaders: int | None = None
    tail: int = 1
    cuts_tokens: bool = False
    whole: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.groups) * self.chunks


def make_plan(layout: Layout, layers: int, *, rows: int = ROWS) -> Plan:
    """The plan of a layout for a model.

    Args:
        layout: The layout.
        layers: Layers of the model, at least as many as stages.
        rows: Rows of every loader's batch.
    """
    world = sum(group.ranks for group in layout.groups)
    loaders = layout.loaders or world
    replicas = gcd(loaders, *(group.dp for group in layout.groups))
    owners = loaders // replicas
    count = lcm(*(owners // gcd(owners, group.dp // replicas) for group in layout.groups))
    if layout.chunks > 1:
        count = lcm(count, len(layout.groups))
    count *= layout.parts
    counts = layers_of(layers, layout.num_stages, uneven=layout.uneven)
    offsets = [sum(group.ranks for group in layout.groups[:index]) for index in range(len(layout.groups))]
    stages, first = [], 0
    for index, size in enumerate(counts):
        group, offset = layout.groups[index % len(layout.groups)], offsets[index % len(layout.groups)]
        stages.append(
            StagePlan(
                layers=(first, first + size),
                mesh=StageMesh(
                    devices=tuple(range(offset, offset + group.ranks)),
                    data_parallel_degree=group.dp,
                    tensor_parallel_degree=group.tp,
                    context_parallel_degree=group.cp,
                    sequence_parallel=group.sequence,
                    shard_degree=group.shard,
                ),
                microbatch_size=rows * loaders // (group.dp * count),
                zero_stage=ZeroStage(group.zero),
                checkpointing=Checkpointing(layers=min(size, group.checkpointed), kind=group.kind),
                offload=group.offload,
            )
        )
        first += size
    stages[-1] = replace(stages[-1], tail_chunks=layout.tail)
    return Plan(
        global_batch_size=rows * loaders,
        data_parallel_size=None if loaders == world else loaders,
        num_microbatches=count,
        stages=tuple(stages),
        schedule=layout.schedule,  # type: ignore[arg-type]
    )


def layers_of(count: int, stages: int, *, uneven: bool = False) -> list[int]:
    """``count`` layers over ``stages`` stages: as even as can be, or with as many as possible in the first."""
    if uneven:
        return [count - stages + 1] + [1] * (stages - 1)
    return [count * (index + 1) // stages - count * index // stages for index in range(stages)]


def _same(count: int, **options: int | bool | str) -> tuple[Group, ...]:
    return (Group(**options),) * count  # type: ignore[arg-type]


_ALL = OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0)
_INPUTS = OffloadRatios(checkpoints=1.0)


def _layouts(groups: Sequence[Group], **options: object) -> Layout:
    return Layout(groups=tuple(groups), **options)  # type: ignore[arg-type]


LAYOUTS: dict[str, Layout] = {
    "dp 2, ZeRO 0": _layouts(_same(1, dp=2)),
    "dp 2, ZeRO 1": _layouts(_same(1, dp=2, zero=1), parts=2),
    "dp 2, ZeRO 2": _layouts(_same(1, dp=2, zero=2), parts=2),
    "dp 3, ZeRO 3": _layouts(_same(1, dp=3, zero=3), parts=2),
    "dp 4, ZeRO 1, HSDP 2 x 2": _layouts(_same(1, dp=4, zero=1, shard=2), parts=2),
    "dp 4, ZeRO 2, HSDP 2 x 2": _layouts(_same(1, dp=4, zero=2, shard=2), parts=2),
    "dp 4, ZeRO 3, HSDP 2 x 2": _layouts(_same(1, dp=4, zero=3, shard=2), parts=2),
    "pp 2 x dp 2": _layouts(_same(2, dp=2)),
    "pp 4, GPipe": _layouts(_same(4), schedule="gpipe"),
    "pp 2 x dp 2, ZeRO 2, some recomputed": _layouts(_same(2, dp=2, zero=2, checkpointed=1), parts=2),
    "pp 2 x dp 2, ZeRO 3, some recomputed": _layouts(_same(2, dp=2, zero=3, checkpointed=1), parts=2),
    "tp 2": _layouts(_same(1, tp=2)),
    "tp 2, sequence": _layouts(_same(1, tp=2, sequence=True)),
    "tp 4": _layouts(_same(1, tp=4)),
    "tp 2 x dp 2": _layouts(_same(1, dp=2, tp=2)),
    "pp 2 x tp 2": _layouts(_same(2, tp=2)),
    "pp 2 x tp 2, sequence, some recomputed": _layouts(_same(2, tp=2, sequence=True, checkpointed=1)),
    "stages (dp 1, tp 2), (dp 2, tp 1)": _layouts([Group(tp=2), Group(dp=2)]),
    "stages (dp 2, tp 1, ZeRO 3), (dp 1, tp 2, sequence)": _layouts([Group(dp=2, zero=3), Group(tp=2, sequence=True)]),
    "stages (dp 4, ZeRO 2, HSDP 2 x 2), (dp 2, tp 2)": _layouts(
        [Group(dp=4, zero=2, shard=2), Group(dp=2, tp=2)], parts=2
    ),
    "stages (dp 3), (dp 1), ZeRO 1, uneven": _layouts([Group(dp=3, zero=1), Group()], uneven=True),
    "interleaved, 2 groups of 2 chunks": _layouts(_same(2), schedule="interleaved-1f1b", chunks=2, parts=2),
    "interleaved, dp 2, ZeRO 2": _layouts(_same(2, dp=2, zero=2), schedule="interleaved-1f1b", chunks=2),
    "zero bubble, pp 2": _layouts(_same(2), schedule="zb-h1", parts=2),
    "zero bubble, pp 3 x dp 2, ZeRO 1": _layouts(_same(3, dp=2, zero=1), schedule="zb-h1"),
    "zero bubble, pp 2 x tp 2": _layouts(_same(2, tp=2), schedule="zb-h1"),
    "zero bubble, pp 2, all offloaded": _layouts([Group(offload=_ALL)] * 2, schedule="zb-h1", parts=2),
    "interleaved, all offloaded": _layouts([Group(offload=_ALL)] * 2, schedule="interleaved-1f1b", chunks=2),
    "dp 4, ZeRO 1, HSDP 2 x 2, all offloaded": _layouts([Group(dp=4, zero=1, shard=2, offload=_ALL)], parts=2),
    "tp 2 x dp 4, ZeRO 3, HSDP 2 x 2": _layouts([Group(dp=4, tp=2, zero=3, shard=2)]),
    "dp 2, ZeRO 3, all recomputed by operator": _layouts(_same(1, dp=2, zero=3, checkpointed=99, kind="selective")),
    "pp 2 x tp 2, sequence, some recomputed by operator": _layouts(
        [Group(tp=2, sequence=True, checkpointed=1, kind="selective"), Group(tp=2, sequence=True, checkpointed=1)]
    ),
    "zero bubble, pp 2, some recomputed by operator": _layouts(
        _same(2, checkpointed=1, kind="selective"), schedule="zb-h1", parts=2
    ),
    "cp 2": _layouts(_same(1, cp=2)),
    "cp 4, all recomputed": _layouts(_same(1, cp=4, checkpointed=99)),
    "cp 2 x dp 2, ZeRO 1": _layouts(_same(1, dp=2, cp=2, zero=1)),
    "cp 2 x dp 2, ZeRO 3, HSDP 2 x 2, some recomputed": _layouts(
        _same(1, dp=2, cp=2, zero=3, shard=2, checkpointed=1), parts=2
    ),
    "pp 2 x cp 2, ZeRO 2": _layouts(_same(2, cp=2, zero=2), parts=2),
    "zero bubble, pp 2 x cp 2, some recomputed by operator": _layouts(
        _same(2, cp=2, checkpointed=1, kind="selective"), schedule="zb-h1"
    ),
    "interleaved, cp 2, all offloaded": _layouts(
        [Group(cp=2, offload=_ALL)] * 2, schedule="interleaved-1f1b", chunks=2
    ),
    "stages (dp 2, ZeRO 3), (cp 2, some recomputed)": _layouts([Group(dp=2, zero=3), Group(cp=2, checkpointed=1)]),
    "1 loader, cp 2": _layouts(_same(1, cp=2), loaders=1),
    "all of it together": _layouts(
        [Group(dp=2, tp=2, zero=3, checkpointed=1, sequence=True), Group(dp=4, zero=2)], parts=2
    ),
    "1 loader, dp 2, ZeRO 2": _layouts(_same(1, dp=2, zero=2), loaders=1, parts=2),
    "1 loader, zero bubble, pp 2": _layouts(_same(2), schedule="zb-h1", loaders=1, parts=3),
    "1 loader, tp 2": _layouts(_same(1, tp=2), loaders=1),
    "2 loaders, pp 2 x dp 2": _layouts(_same(2, dp=2), loaders=2),
    "2 loaders, pp 2 x tp 2, sequence": _layouts(_same(2, tp=2, sequence=True), loaders=2),
    "2 loaders, stages (dp 2, tp 1, ZeRO 3), (dp 1, tp 2)": _layouts([Group(dp=2, zero=3), Group(tp=2)], loaders=2),
    "2 loaders, interleaved, dp 2, ZeRO 2": _layouts(
        _same(2, dp=2, zero=2), schedule="interleaved-1f1b", chunks=2, loaders=2
    ),
    "dp 2, ZeRO 1, whole parameters": _layouts(_same(1, dp=2, zero=1), parts=2, whole=True),
    "dp 4, ZeRO 2, HSDP 2 x 2, whole parameters": _layouts(_same(1, dp=4, zero=2, shard=2), parts=2, whole=True),
    "dp 3, ZeRO 3, whole parameters": _layouts(_same(1, dp=3, zero=3), parts=2, whole=True),
    "pp 2 x dp 2, ZeRO 3, whole parameters": _layouts(_same(2, dp=2, zero=3), whole=True),
    "dp 2, ZeRO 2, 3 chunks of rows": _layouts(_same(1, dp=2, zero=2), parts=2, tail=3),
    "zero bubble, pp 2, some recomputed, 4 chunks of rows": _layouts(
        _same(2, checkpointed=1), schedule="zb-h1", tail=4
    ),
    "dp 2, ZeRO 3, 5 chunks of tokens": _layouts(_same(1, dp=2, zero=3), tail=5, cuts_tokens=True),
    "interleaved, 5 chunks of tokens": _layouts(
        _same(2), schedule="interleaved-1f1b", chunks=2, tail=5, cuts_tokens=True
    ),
    "dp 2, ZeRO 2, all recomputed, inputs offloaded": _layouts([Group(dp=2, zero=2, checkpointed=99, offload=_INPUTS)]),
    "zero bubble, pp 2, some recomputed, inputs offloaded": _layouts(
        [Group(checkpointed=1, offload=_INPUTS)] * 2, schedule="zb-h1", parts=2
    ),
}
"""Every way to train that the table holds against a single process; ranks of one stage follow one another."""

_OFFLOADING: dict[str, Layout] = {
    "one device": _layouts(_same(1), parts=2),
    "one device, some recomputed": _layouts(_same(1, checkpointed=2), parts=2),
    "dp 2, ZeRO 0": _layouts(_same(1, dp=2), parts=2),
    "dp 2, ZeRO 1": _layouts(_same(1, dp=2, zero=1), parts=2),
    "dp 2, ZeRO 2": _layouts(_same(1, dp=2, zero=2), parts=2),
    "dp 2, ZeRO 3, some recomputed": _layouts(_same(1, dp=2, zero=3, checkpointed=1), parts=2),
    "pp 2 x dp 2": _layouts(_same(2, dp=2), parts=2),
    "tp 2": _layouts(_same(1, tp=2), parts=2),
}
_RATIOS = (0.0, 0.3, 1.0)


def _offloading() -> dict[str, Layout]:
    """Layouts with ratios such that any two kinds' ratios, and any ratio and layout, occur together."""
    found = {}
    for number, (name, layout) in enumerate(_OFFLOADING.items(), start=1):
        # Two numbers of 0, 1 and 2; their multiples and sums are all pairs of shifts between kinds.
        first, second = divmod(number, 3)
        for index in range(3):
            p, g, o, a = (_RATIOS[(index + shift) % 3] for shift in (0, first, second, first + second))
            offload = OffloadRatios(parameters=p, gradients=g, optimizer=o, activations=a)
            groups = tuple(replace(group, offload=offload) for group in layout.groups)
            found[f"{name}, offload {p:g} {g:g} {o:g} {a:g}"] = replace(layout, groups=groups)
    return found


OFFLOADING = _offloading()
"""What of these is offloaded: parameters, gradients, optimizer state, activations."""

LAYOUTS |= OFFLOADING
