"""What a rank's device needs: allocated, reserved, device total, each as likely and as what suffices almost always.

How sure that is follows from how far off predictions of bytes were where somebody looked. A *record* holds predictions
beside what was measured. Of a row with relative error ``e`` (predicted over measured, less one) the need was
``1 / (1 + e)`` of the prediction. The middle of these factors and the one that 95 of 100 rows stay below are the
*spread* of such predictions; :data:`SPREADS` has those of committed records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import hypot
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeAlias

from lightning_mist.estimate.allocator import (
    MIB,
    AllocatorSettings,
    MemoryEvent,
    least_capacity,
    malloc,
    simulate_allocator,
)
from lightning_mist.hardware.catalog import (
    NOTHING,
    Overhead,
    alone_overhead,
    communicator_overhead,
    context_overhead,
    workspace_bytes,
)
from lightning_mist.hardware.cluster import Cluster
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.mesh import MESSAGE_CHANNELS, message_pairs, process_groups


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Interval:
    """Bytes that are as likely too many as too few, and bytes that suffice in 95 of 100 cases."""

    p50: int
    p95: int

    def __post_init__(self) -> None:
        """Check the order."""
        if not 0 <= self.p50 <= self.p95:
            raise ValueError(f"p50 = {self.p50}, p95 = {self.p95}: bytes are not negative, and p95 is at least p50")

    def risk(self, limit: float) -> float:
        """The share of cases that need more than a limit, of a normal distribution with these two quantiles."""
        if self.p95 == self.p50:
            return float(self.p50 > limit)
        return 1 - NormalDist(self.p50, (self.p95 - self.p50) / NormalDist().inv_cdf(0.95)).cdf(limit)


Quantity: TypeAlias = Literal[
    "allocated", "reserved", "reserved over allocated", "summed", "summed reserved", "closed form"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Factors from what is predicted to what is needed.

    Attributes:
        middle: Half of the needs lay below this many times the prediction.
    """

    middle: float
    high: float
    source: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the order."""
        if not 0 < self.middle <= self.high:
            raise ValueError(f"middle = {self.middle}, high = {self.high}: 0 < middle <= high")

    @property
    def low(self) -> float:
        """The factor that 95 of 100 needs lie above, if they lie as far below the middle as above it."""
        return self.middle**2 / self.high

    def of(self, nbytes: float) -> Interval:
        """The interval of a prediction: it is the middle where its error has no direction to speak of."""
        return Interval(p50=round(nbytes * self.middle), p95=round(nbytes * self.high))


_EXECUTED_STAGES = (
    "26 stages of executed pipelines, artifact of Mist (Dazz993/Mist at d69e530): mean 1.12, 1.06 to 1.23",
)

_SUMMED = ("summed-needs_amd-epyc-2-cores_202611",)

SPREADS: dict[Quantity, Spread] = {
    # Tensors of plans that this runtime executed, as the meter saw them; rounded up to a hundredth.
    "allocated": Spread(
        middle=1.0,
        high=1.01,
        source=("accuracy_amd-epyc-2-cores_202611", "memory-limits_amd-epyc-2-cores_202611"),
    ),
    # Replayed through the allocator: no worse than not to replay at all. Replays of other runtimes came within 0.01
    # (``benchmarks.accuracy.published_memory``), but no run of this one on a CUDA device has been recorded yet.
    "reserved": Spread(middle=1.0, high=1.23 / 1.12, source=_EXECUTED_STAGES),
    # Not replayed.
    "reserved over allocated": Spread(middle=1.12, high=1.23, source=_EXECUTED_STAGES),
    # Sums where no replay is possible, from how far sums are off where one is. Tensors: at most 1.02 times the sums,
    # and of smaller networks in single precision once 1.06 times. Reserved: 1.12 times in the middle and 1.26 times in
    # 95 of 100 cases; with the replay's own spread, independent of it, 1.12 + hypot(1.26 - 1.12, 1.23 - 1.12) = 1.30.
    "summed": Spread(middle=1.0, high=1.06, source=_SUMMED),
    "summed reserved": Spread(middle=1.12, high=1.30, source=_SUMMED + _EXECUTED_STAGES),
    # In none of 454 runs did all that formulas leave out exceed a fifth of the device.
    "closed form": Spread(middle=1.0, high=1.25, source=("Fujii, Watanabe, Yokota, 2024, arXiv 2411.06465",)),
}
"""Spreads of predictions by quantity."""


class Communicator(NamedTuple):
    """One NCCL communicator of a rank of a running plan.

    Each group has one from the start: Lightning binds the default group to the device, and then groups connect when
    they are made (``torch.distributed.init_process_group``, ``device_id``). Messages between stages have one for each
    direction of each pair of ranks. Groups for objects and host tensors use gloo and hold nothing.
    """

    ranks: tuple[int, ...]
    is_for_messages: bool = False


def communicators_of(plan: Plan, module_map: ModuleMap, rank: int) -> tuple[Communicator, ...]:
    """Every communicator that a rank holds.

    Returns:
        The communicators, first that of Lightning's default group; groups of one rank have none. Equal groups share
        one, but for the default group and the pairs that send each other messages.
    """
    groups, pairs = _groups_of_ranks(plan, module_map)
    found = [tuple(range(plan.world_size))]
    if plan.data_parallel_size is not None:
        # What is logged is reduced over one rank of each loader.
        size = plan.world_size // plan.num_loaders
        found.append(tuple(range(rank % size, plan.world_size, size)))
    messages = [Communicator(tuple(sorted(pair)), is_for_messages=True) for pair in pairs.get(rank, ())]
    return (*(Communicator(ranks) for ranks in (*found, *groups[rank]) if len(ranks) > 1), *messages)


_Groups: TypeAlias = dict[int, list[tuple[int, ...]]]


@lru_cache(maxsize=2)
def _groups_of_ranks(plan: Plan, module_map: ModuleMap) -> tuple[_Groups, _Groups]:
    """The groups, and the pairs that send each other messages, of every rank of a plan; all stages ask for theirs."""
    groups: _Groups = {rank: [] for rank in range(plan.world_size)}
    pairs: _Groups = {}
    for found, every in ((groups, process_groups(plan, module_map)), (pairs, message_pairs(plan))):
        for ranks in every:
            for rank in ranks:
                found.setdefault(rank, []).append(ranks)
    return groups, pairs


def communicators_by_degrees(plan: Plan, rank: int) -> tuple[Communicator, ...]:
    """As :func:`communicators_of` for plans that the runtime does not execute: those that their degrees need."""
    group = plan.stage_of(rank)
    mesh = plan.stages[group].mesh
    place, tensor = mesh.devices.index(rank), mesh.tensor_parallel_degree
    shared = tensor * mesh.context_parallel_degree
    first, index = place // tensor * tensor, place // tensor
    peers, count = mesh.devices[place % tensor :: tensor], mesh.shard_ranks
    groups = [
        *[tuple(range(plan.world_size))] * 2,  # Lightning's, and the plan's own
        peers if mesh.context_parallel_degree > 1 else (),
        mesh.devices[place % shared :: shared],
        *([peers[index // count * count :][:count], peers[index % count :: count]] if mesh.shard_degree else ()),
        mesh.devices[place // shared * shared + place % tensor :: tensor][: shared // tensor],
        mesh.devices[first : first + tensor],
    ]
    found = [Communicator(tuple(sorted(ranks))) for ranks in groups if len(ranks) > 1]
    for other in (group - 1, group + 1):
        if 0 <= other < plan.num_groups:
            there = plan.stages[other].devices[min(place, len(plan.stages[other].devices) - 1)]
            # One for either direction of rank numbers.
            found += [Communicator((min(rank, there), max(rank, there)), is_for_messages=True)] * 2
    return tuple(found)


HANDLES = 2
"""Handles of cuBLAS that multiply on the stream that computes: torch has one for each thread, and autograd has a thread
of its own for backward. Both workspaces were seen on an H200 (``benchmarks.hardware.device_memory``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverheads:
    """What one rank's device holds outside of the caching allocator, and what libraries take inside of it.

    Attributes:
        workspace_bytes: What cuBLAS keeps for each of :data:`HANDLES`; tensors to the allocator.
        has_allocator: Whether there is a caching allocator: not on CPU, where what is allocated is the total.
    """

    context: Overhead
    communicators: Overhead
    workspace_bytes: int
    has_allocator: bool

    @property
    def workspaces_bytes(self) -> int:
        """What all handles of cuBLAS keep."""
        return HANDLES * self.workspace_bytes

    @property
    def outside(self) -> Overhead:
        """All that is outside of the allocator."""
        return _sum((self.context, self.communicators))


def device_overheads(cluster: Cluster, communicators: tuple[Communicator, ...]) -> DeviceOverheads:
    """What a device of a cluster holds besides tensors."""
    if cluster.device.kind != "cuda":
        return DeviceOverheads(context=NOTHING, communicators=NOTHING, workspace_bytes=0, has_allocator=False)
    alone = () if communicators else (alone_overhead(cluster.device.name),)
    return DeviceOverheads(
        context=context_overhead(cluster.device.name),
        communicators=_sum(
            tuple(
                communicator_overhead(cluster, len(ranks), MESSAGE_CHANNELS if is_for_messages else None)
                for ranks, is_for_messages in communicators
            )
            + alone
        ),
        workspace_bytes=workspace_bytes(cluster.device.name),
        has_allocator=True,
    )


def allocator_capacity(cluster: Cluster, overheads: DeviceOverheads) -> int:
    """Bytes that the caching allocator may reserve: the device's less all that is outside, as expected; at least 1."""
    return max(1, cluster.device.memory_bytes - overheads.outside.expected)


def workspaces(nbytes: int, count: int = HANDLES) -> tuple[MemoryEvent, ...]:
    """What cuBLAS allocates when a handle first multiplies matrices, and never frees; to put before a step's events.

    Their identities are negative, so that those of tensors may count from 0.
    """
    return tuple(malloc(-2 - index, nbytes, "compute") for index in range(count) if nbytes)


def _sum(overheads: tuple[Overhead, ...]) -> Overhead:
    return Overhead(
        expected=sum(overhead.expected for overhead in overheads),
        high=sum(overhead.high for overhead in overheads),
        source="; ".join(dict.fromkeys(overhead.source for overhead in overheads)),
    )


_FIRST_SEGMENTS = 22 * MIB
"""One segment of 2 MiB for small tensors and one of 20 MiB for larger ones, which any training step takes.

Source: ``kSmallBuffer`` and ``kLargeBuffer`` in c10/cuda/CUDACachingAllocator.h.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """What one rank's device needs.

    The allocator takes more while there is room and gives it back when there is none, so what it would hold is not what
    is needed: a device total above the device's memory is one that cannot be had, not one that is not necessary.

    Attributes:
        least: Bytes of the device that 95 of 100 need at least: of tensors, and of what the allocator cannot do without
            where that was looked for, with what is outside of it.
        allocator_bytes: Of p50 of ``reserved``, what is not allocated.
        flushes: How often in the replayed steps everything that is free is given back, which waits for the device.
    """

    allocated: Interval
    reserved: Interval
    device_total: Interval
    least: int
    allocator_bytes: int = 0
    context_bytes: int = 0
    communicator_bytes: int = 0
    flushes: int = 0


def replayed_need(
    events: Sequence[MemoryEvent],
    cluster: Cluster,
    overheads: DeviceOverheads,
    *,
    settings: AllocatorSettings | None = None,
    limit: int | None = None,
) -> DeviceNeed:
    """The need of a rank whose allocations are known one by one.

    Where tensors alone take more than may be used, the least capacity is not searched for, since nothing would run:
    the need is what the allocator would hold without limit.

    Args:
        events: Its allocations, of two optimizer steps at least.
        settings: How the allocator is set up, but for its capacity; torch's defaults if not given.
        limit: Bytes of the device that may be used; its memory if not given.
    """
    settings = settings or AllocatorSettings()
    limit = cluster.device.memory_bytes if limit is None else limit
    free_of_limits = replace(settings, capacity_bytes=None, garbage_collection_threshold=None)
    if not overheads.has_allocator:
        return _without_allocator(simulate_allocator(events, free_of_limits).peak_requested, SPREADS["allocated"])
    every = (*workspaces(overheads.workspace_bytes), *events)
    capacity = allocator_capacity(cluster, overheads)
    unlimited = simulate_allocator(every, free_of_limits)
    result, least, needed = unlimited, unlimited.peak_reserved, 0
    room = max(1, min(capacity, limit - overheads.outside.expected))
    if unlimited.peak_allocated <= room < least:
        least = needed = least_capacity(every, settings)
        result = simulate_allocator(every, replace(settings, capacity_bytes=max(room, least)))
    return _with_allocator(
        allocated=SPREADS["allocated"].of(unlimited.peak_allocated),
        reserved=result.peak_reserved,
        comfortable=unlimited.peak_reserved,
        least=least,
        surely=(_short_of(unlimited.peak_allocated, SPREADS["allocated"]), _short_of(needed, SPREADS["reserved"])),
        overheads=overheads,
        spread=SPREADS["reserved"],
        limit=limit,
        flushes=result.flushes,
    )


def summed_need(
    allocated: int,
    cluster: Cluster,
    overheads: DeviceOverheads,
    *,
    limit: int | None = None,
    is_traced: bool = True,
    is_final: bool = False,
) -> DeviceNeed:
    """The need of a rank of which only the peak of its tensors is known.

    Where no replay follows, the interval is as wide as sums were off where one could: by a factor, and by the two
    segments that an allocator starts with, which are most of what a small network needs.

    Args:
        limit: Bytes of the device that may be used; its memory if not given.
        is_traced: Whether the peak comes from a traced step rather than from a closed form.
        is_final: Whether no replay will take its place.
    """
    tensors = SPREADS[("summed" if is_final else "allocated") if is_traced else "closed form"]
    if not overheads.has_allocator:
        return _without_allocator(allocated, tensors)
    # A closed form's spread is that of all that formulas leave out, the allocator included.
    ratio = SPREADS["summed reserved" if is_final and is_traced else "reserved over allocated"]
    start = _FIRST_SEGMENTS if is_final else 0
    reserved = max(start, round(allocated * ratio.middle))
    factor = ratio.high / ratio.middle * (1.0 if is_final and is_traced else tensors.high)
    return _with_allocator(
        allocated=tensors.of(allocated),
        reserved=reserved,
        comfortable=reserved,
        least=reserved,
        surely=(_short_of(allocated, tensors),),
        overheads=overheads,
        spread=Spread(middle=1.0, high=factor + start / max(1, reserved), source=ratio.source),
        limit=cluster.device.memory_bytes if limit is None else limit,
    )


def _without_allocator(allocated: int, spread: Spread) -> DeviceNeed:
    """On CPU what is allocated is all."""
    need = spread.of(allocated)
    return DeviceNeed(allocated=need, reserved=need, device_total=need, least=round(allocated * spread.low))


def _with_allocator(
    *,
    allocated: Interval,
    reserved: int,
    comfortable: int,
    least: int,
    surely: Sequence[tuple[int, int]],
    overheads: DeviceOverheads,
    spread: Spread,
    limit: int,
    flushes: int = 0,
) -> DeviceNeed:
    """With an allocator: reserved at the limit, without one (comfortable: nothing is ever given back), and at least.

    Args:
        surely: What cannot be done without, each as likely and by how much less it may be.
    """
    outside, doubt = overheads.outside.expected, overheads.outside.high - overheads.outside.expected
    likely = spread.of(reserved).p50
    high = _within(spread.of(comfortable).p95, spread.of(least).p95, limit - outside)
    # Errors of the replay and of what is outside have nothing to do with each other.
    total_high = _within(
        _almost_always(comfortable, spread, overheads), _almost_always(least, spread, overheads), limit
    )
    return DeviceNeed(
        allocated=allocated,
        reserved=Interval(p50=likely, p95=max(likely, high)),
        device_total=Interval(p50=likely + outside, p95=max(likely + outside, total_high)),
        least=max(0, *(need + outside - round(hypot(short, min(doubt, outside))) for need, short in surely)),
        allocator_bytes=max(0, likely - allocated.p50),
        context_bytes=overheads.context.expected,
        communicator_bytes=overheads.communicators.expected,
        flushes=flushes,
    )


def _short_of(nbytes: int, spread: Spread) -> tuple[int, int]:
    """What is as likely needed, and by how much less it is in 5 of 100 cases."""
    return round(nbytes * spread.middle), round(nbytes * (spread.middle - spread.low))


def _within(comfortable: int, least: int, limit: int) -> int:
    """What is held at most: all that there is where that is less than wanted, unless even the least is more."""
    return comfortable if comfortable <= limit else max(least, limit)


def _almost_always(reserved: int, spread: Spread, overheads: DeviceOverheads) -> int:
    outside = overheads.outside
    likely = spread.of(reserved)
    return likely.p50 + outside.expected + round(hypot(likely.p95 - likely.p50, outside.high - outside.expected))
