"""Who updates which parameter under ZeRO-1: one rule for the runtime and for the cost model."""

from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Give every parameter of a stage, as a whole, to one of its data-parallel ranks.

    The largest unassigned parameter goes to the rank with the least so far (the longest-processing-time rule; Graham,
    1969: the largest share is at most 4/3 of the best possible). Ties go to the earlier parameter and the lower rank,
    so every rank computes the same answer.

    Args:
        sizes: Elements or bytes of each parameter.
        ranks: Number of data-parallel ranks, at least 1.

    Returns:
        The rank index of each parameter, in the order of ``sizes``.

    Raises:
        ValueError: If ``ranks`` is below 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: parameters need at least one rank to own them")
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += sizes[index]
    return tuple(owners)
