"""What a rank's device needs: allocated, reserved, device total, each as likely and as what suffices almost always."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot

from lightning_mist.estimate.allocator import (
    MIB,
    AllocatorSettings,
    MemoryEvent,
    least_capacity,
    malloc,
    simulate_allocator,
)
from lightning_mist.estimate.communicators import Communicator
from lightning_mist.estimate.uncertainty import SPREADS, Interval, Spread
from lightning_mist.hardware.catalog import NOTHING, Overhead, communicator_overhead, context_overhead, workspace_bytes
from lightning_mist.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverheads:
    """What one rank's device holds outside of the caching allocator, and what libraries take inside of it.

    Attributes:
        workspace_bytes: What cuBLAS keeps for each stream that multiplies matrices; tensors to the allocator.
        has_allocator: Whether there is a caching allocator: not on CPU, where what is allocated is the total.
    """

    context: Overhead
    communicators: Overhead
    workspace_bytes: int
    has_allocator: bool

    @property
    def outside(self) -> Overhead:
        """All that is outside of the allocator."""
        return _sum((self.context, self.communicators))


def device_overheads(cluster: Cluster, communicators: tuple[Communicator, ...]) -> DeviceOverheads:
    """What a device of a cluster holds besides tensors."""
    if cluster.device.kind != "cuda":
        return DeviceOverheads(context=NOTHING, communicators=NOTHING, workspace_bytes=0, has_allocator=False)
    return DeviceOverheads(
        context=context_overhead(cluster.device.name),
        communicators=_sum(tuple(communicator_overhead(cluster, len(each.ranks)) for each in communicators)),
        workspace_bytes=workspace_bytes(cluster.device.name),
        has_allocator=True,
    )


def allocator_capacity(cluster: Cluster, overheads: DeviceOverheads) -> int:
    """Bytes that the caching allocator may reserve: the device's less all that is outside, as expected; at least 1."""
    return max(1, cluster.device.memory_bytes - overheads.outside.expected)


def workspaces(nbytes: int, streams: tuple[str, ...] = ("compute",)) -> tuple[MemoryEvent, ...]:
    """What cuBLAS allocates when a stream first multiplies matrices, and never frees; to put before a step's events.

    Their identities are negative, so that those of tensors may count from 0.
    """
    return tuple(malloc(-2 - index, nbytes, stream) for index, stream in enumerate(streams) if nbytes)


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
        allocator_bytes: Of p50 of ``reserved``, what is not allocated.
        flushes: How often in the replayed steps everything that is free is given back, which waits for the device.
    """

    allocated: Interval
    reserved: Interval
    device_total: Interval
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
    if not overheads.has_allocator:
        return _without_allocator(simulate_allocator(events, settings).peak.requested, SPREADS["allocated"])
    every = (*workspaces(overheads.workspace_bytes), *events)
    capacity = allocator_capacity(cluster, overheads)
    unlimited = simulate_allocator(every, replace(settings, capacity_bytes=None, garbage_collection_threshold=None))
    result, least = unlimited, unlimited.peak.reserved
    room = max(1, min(capacity, limit - overheads.outside.expected))
    if unlimited.peak.allocated <= room < least:
        least = least_capacity(every, settings)
        result = simulate_allocator(every, replace(settings, capacity_bytes=max(room, least)))
    return _with_allocator(
        allocated=SPREADS["allocated"].of(unlimited.peak.allocated),
        reserved=result.peak.reserved,
        comfortable=unlimited.peak.reserved,
        least=least,
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
        overheads=overheads,
        spread=Spread(middle=1.0, high=factor + start / max(1, reserved), source=ratio.source),
        limit=cluster.device.memory_bytes if limit is None else limit,
    )


def _without_allocator(allocated: int, spread: Spread) -> DeviceNeed:
    """On CPU what is allocated is all."""
    need = spread.of(allocated)
    return DeviceNeed(allocated=need, reserved=need, device_total=need)


def _with_allocator(
    *,
    allocated: Interval,
    reserved: int,
    comfortable: int,
    least: int,
    overheads: DeviceOverheads,
    spread: Spread,
    limit: int,
    flushes: int = 0,
) -> DeviceNeed:
    """With an allocator: reserved at the limit, without one (comfortable: nothing is ever given back), and at least."""
    outside = overheads.outside.expected
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
        allocator_bytes=max(0, likely - allocated.p50),
        context_bytes=overheads.context.expected,
        communicator_bytes=overheads.communicators.expected,
        flushes=flushes,
    )


def _within(comfortable: int, least: int, limit: int) -> int:
    """What is held at most: all that there is where that is less than wanted, unless even the least is more."""
    return comfortable if comfortable <= limit else max(least, limit)


def _almost_always(reserved: int, spread: Spread, overheads: DeviceOverheads) -> int:
    outside = overheads.outside
    likely = spread.of(reserved)
    return likely.p50 + outside.expected + round(hypot(likely.p95 - likely.p50, outside.high - outside.expected))
