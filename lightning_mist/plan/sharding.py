"""Who owns which parameter under ZeRO: one rule for the runtime and for the cost model."""

from collections.abc import Sequence
from heapq import heapreplace


def assign_owners(sizes: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> tuple[int, ...]:
    """Give every parameter of a stage, as a whole, to one of its data-parallel ranks.

    The largest unassigned parameter goes to the rank with the least so far (the longest-processing-time rule; Graham,
    1969: the largest share is at most 4/3 of the best possible). Ties go to the earlier parameter and the lower rank,
    so every rank computes the same answer.

    Args:
        sizes: Elements or bytes of each parameter.
        ranks: Number of data-parallel ranks, at least 1.
        loads: What each rank owns already; nothing if empty.

    Returns:
        The rank index of each parameter, in the order of ``sizes``.

    Raises:
        ValueError: If ``ranks`` is below 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: parameters need at least one rank to own them")
    # Least load first, then lowest rank; a sorted list is a heap.
    heap = sorted((load, rank) for rank, load in enumerate(loads or [0] * ranks))
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, owner = heap[0]
        owners[index] = owner
        heapreplace(heap, (load + sizes[index], owner))
    return tuple(owners)
