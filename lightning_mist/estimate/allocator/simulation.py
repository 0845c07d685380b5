"""What torch's caching allocator reserves for a list of allocations.

Tensors ask for bytes; the allocator hands out blocks that it cuts from segments, and keeps what is freed for later
requests of the same stream and size class. So it holds more of the device than is allocated: rests of segments, blocks
of the wrong size, blocks of other streams. How much depends on the order of requests, so the order is replayed.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_mist.estimate.allocator.allocator_data import (
    AllocatorBytes,
    AllocatorResult,
    AllocatorSettings,
    MemoryEvent,
)
from lightning_mist.estimate.allocator.device_allocator import CachingAllocator

# Segments are multiples of it, so nothing finer than this can decide whether a request fits.
_STEP_BYTES = 2 << 20


def simulate_allocator(events: Sequence[MemoryEvent], settings: AllocatorSettings | None = None) -> AllocatorResult:
    """Replay allocations through the caching allocator.

    Raises:
        ValueError: If an event names an allocation that does not exist, or makes one that does.
    """
    device = CachingAllocator(settings or AllocatorSettings())
    failed = None
    requested = allocated = active = 0
    for index, (kind, identity, nbytes, stream) in enumerate(events):
        if kind == "malloc":
            if not device.malloc(identity, nbytes, stream):
                failed = index
                break
            active = max(active, device.active)
            requested = max(requested, device.requested)
            allocated = max(allocated, device.allocated)
        elif kind == "free":
            device.free(identity)
        elif kind == "use":
            device.use(identity, stream)
        else:
            device.finish(stream)
    return AllocatorResult(
        peak=AllocatorBytes(requested=requested, allocated=allocated, active=active, reserved=device.peak_reserved),
        final=device.held(),
        flushes=device.flushes,
        out_of_memory=failed,
    )


def least_capacity(events: Sequence[MemoryEvent], settings: AllocatorSettings | None = None) -> int:
    """Bytes that suffice for a list of allocations, if need be by giving all free memory back in between.

    Fragmentation may let a larger capacity fail where a smaller one serves; the result is one at which the events run
    and 2 MiB less fails, found by bisection.

    Args:
        settings: How the allocator is set up; its capacity is ignored.
    """
    settings = settings or AllocatorSettings()
    # Giving back early is a choice made below a capacity; it is no part of what is needed.
    free_of_limits = replace(settings, capacity_bytes=None, garbage_collection_threshold=None)
    enough, too_little = simulate_allocator(events, free_of_limits).peak.reserved, 0
    while enough - too_little > _STEP_BYTES:
        middle = too_little + (enough - too_little) // _STEP_BYTES // 2 * _STEP_BYTES
        result = simulate_allocator(events, replace(free_of_limits, capacity_bytes=middle))
        if result.out_of_memory is None:
            enough = middle
        else:
            too_little = middle
    return enough
