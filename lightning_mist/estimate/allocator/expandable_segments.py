"""Expandable segments: ranges of addresses that get memory page by page, where a request needs it.

One range per pool grows at its end; pages are given back only when the allocator gives back all it can. After
``c10/cuda/CUDACachingAllocator.cpp`` of torch (``find_expandable_block``, ``map_block``, ``unmap_block``).
"""

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from lightning_mist.estimate.allocator.pools import Block, Pool

# Asks the device for so many bytes; False if it has not got them.
Reserve = Callable[[int], bool]

# Makes a new range of addresses for a pool: one block of at least so many bytes, without memory yet.
NewRange = Callable[[Pool, int], Block]

_by_address = attrgetter("address")


def best_fit(pool: Pool, size: int) -> Block | None:
    """The free block for a request.

    A block at the end of what is mapped counts with the addresses that it could still grow into, so blocks that cannot
    grow are preferred although they are larger now.
    """
    index = pool.first(size)
    if index == len(pool):
        return None
    best = pool.at(index)
    while index + 1 < len(pool):
        other = pool.at(index + 1)
        if _could_grow_to(other) >= _could_grow_to(best):
            break
        best, index = other, index + 1
    return best


def grow(pool: Pool, size: int, new_range: NewRange, reserve: Reserve) -> Block | None:
    """Map memory for a request that no free block can serve, next to free memory where there is some.

    Returns:
        A block of at least ``size`` bytes, in no pool; None if the device has no memory left, where pages that were
        mapped meanwhile stay, as free blocks.
    """
    block = _lowest_range(pool, size)
    if block is None:
        block = new_range(pool, size)
        pool.unmapped.append(block)  # the highest address
    if not block.is_mapped and not _map(block, min(block.size, size), reserve):
        return None
    while block.size < size:
        following = block.after
        assert following is not None  # `_lowest_range` saw to it
        if not _map(following, min(size - block.size, following.size), reserve):
            return None
        block = following
    pool.remove(block)
    return block


def unmap(block: Block) -> int:
    """Give whole pages of a free block back to the device; how many bytes."""
    pool, page = block.pool, block.pool.segment_bytes
    first = -(-block.address // page) * page
    end = (block.address + block.size) // page * page
    if first >= end:
        return 0
    pool.remove(block)
    if first > block.address:
        low = Block(pool, block.address, first - block.address)
        block.put_before(low)
        pool.add(low)
    if end < block.address + block.size:
        high = Block(pool, end, block.address + block.size - end)
        block.put_after(high)
        pool.add(high)
    block.address, block.size, block.is_mapped = first, end - first, False
    for neighbour in (block.before, block.after):
        if neighbour is not None and not neighbour.is_mapped:
            pool.unmapped.remove(neighbour)
            block.swallow(neighbour)
    if not block.is_whole:  # else the range itself is given up
        insort(pool.unmapped, block, key=_by_address)
    return end - first


def _could_grow_to(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _lowest_range(pool: Pool, size: int) -> Block | None:
    """The first of free and unmapped neighbours that together have room for ``size`` bytes."""
    for unmapped in pool.unmapped:
        before = unmapped.before
        start = before if before is not None and before.is_free else unmapped
        room, block = 0, start
        while room < size and (block.is_free or not block.is_mapped):
            room += block.size
            if block.after is None:
                break
            block = block.after
        if room >= size:
            return start
    return None


def _map(block: Block, size: int, reserve: Reserve) -> bool:
    """Give the beginning of an unmapped block memory for ``size`` bytes, in whole pages, and free it."""
    pool, page = block.pool, block.pool.segment_bytes
    mapped = -(-size // page) * page
    if not reserve(mapped):
        return False
    pool.unmapped.remove(block)
    block.is_mapped = True
    if mapped < block.size:
        rest = Block(pool, block.address + mapped, block.size - mapped)
        rest.is_mapped = False
        block.put_after(rest)
        insort(pool.unmapped, rest, key=_by_address)
        block.size = mapped
    pool.free(block)
    return True
