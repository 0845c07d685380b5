"""Which parameters are owned, sent and offloaded together: one rule for the runtime and for the cost model."""

from collections.abc import Hashable, Sequence
from heapq import heapreplace


def assign_owners(sizes: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> tuple[int, ...]:
    """Give every parameter of a stage, as a whole, to one of its data-parallel ranks.

    The largest unassigned parameter goes to the rank with the least so far (the longest-processing-time rule; Graham,
    1969: the largest share is at most 4/3 of the best possible). Ties go to the earlier parameter and the lower rank,
    so every rank computes the same answer.

    Args:
        sizes: Elements or bytes of each parameter.
        loads: What each rank owns already; nothing if empty.

    Returns:
        The rank index of each parameter, in the order of ``sizes``.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: parameters need at least one rank to own them")
    owners = [0] * len(sizes)
    # Backwards, equal ones stay in their order.
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    if ranks >= len(sizes) and not loads and all(sizes):
        # Every rank that has none yet comes before those that have one.
        for owner, index in enumerate(order):
            owners[index] = owner
        return tuple(owners)
    # Least load first, then lowest rank; a sorted list is a heap.
    heap = sorted((load, rank) for rank, load in enumerate(loads or [0] * ranks))
    for index in order:
        load, owner = heap[0]
        owners[index] = owner
        heapreplace(heap, (load + sizes[index], owner))
    return tuple(owners)


BUCKET_BYTES = 25 * 2**20
"""Capacity of a bucket: the default ``bucket_cap_mb`` of ``torch.nn.parallel.DistributedDataParallel``."""

FIRST_BUCKET_BYTES = 2**20
"""Capacity of the first bucket, small so that communication starts early: torch's ``_DEFAULT_FIRST_BUCKET_BYTES``."""


def deal_buckets(
    sizes: Sequence[int],
    keys: Sequence[Hashable],
    *,
    capacity: int = BUCKET_BYTES,
    first_capacity: int = FIRST_BUCKET_BYTES,
) -> tuple[tuple[int, ...], ...]:
    """Deal parameters into buckets, in their order.

    Args:
        keys: Parameters with different keys (owner, element type, device) never share a bucket.
        capacity: Bytes at which a bucket is closed; a larger parameter has a bucket of its own.
        first_capacity: The same for the first bucket that is closed.

    Returns:
        Indices of the parameters of each bucket, in the order in which the buckets' last parameters come.
    """
    closed: list[tuple[int, ...]] = []
    waiting: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        mine = waiting.setdefault(key, [])
        mine.append(index)
        if sum(sizes[item] for item in mine) >= (capacity if closed else first_capacity):
            closed.append(tuple(waiting.pop(key)))
    return (*closed, *map(tuple, waiting.values()))


def moved_of_unit(sizes: Sequence[float], ratio: float) -> tuple[int, ...]:
    """Which parameters of one unit are moved.

    From the largest to the smallest, the earlier first among equals, a parameter is moved if the bytes moved then still
    are at most ``ratio`` of the unit's. So a unit of one parameter is moved at ratio 1 only.
    """
    if ratio == 0.0:
        return ()
    # Bytes are whole numbers: one part in 10^12 is less than one of them, and more than rounding.
    room, moved = ratio * sum(sizes) * (1 + 1e-12), []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if 0 < sizes[index] <= room:
            moved.append(index)
            room -= sizes[index]
    return tuple(moved)
