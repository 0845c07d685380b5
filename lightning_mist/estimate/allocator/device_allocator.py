"""One device's caching allocator: what it does with a request, step by step as torch's.

After ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.1 to 2.13, without private pools
(CUDA graphs), and without memory that several streams use: what is replayed here is used on the stream that allocates.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from lightning_mist.estimate.allocator.allocator_data import (
    BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    Block,
    MemoryEvent,
    Pool,
    split,
)

# kMinBlockSize (small pool, expandable segments) and kSmallSize (large pool) in should_split.
_SMALL_REST_BYTES = BLOCK_BYTES
_LARGE_REST_BYTES = SMALL_BYTES + 1

# m_max_non_split_rounding_size: how much larger than a request a block may be that must not be split.
_OVERSIZE_BYTES = 20 << 20

# Where a device has no limit, expandable segments get as many addresses as a process has (47 bits).
_ADDRESSES = 1 << 47


class CachingAllocator:
    """Blocks by identity, pools by stream, and what is held.

    Attributes:
        requested: What living tensors ask for, in bytes.
        allocated: The same in whole blocks (``torch.cuda.memory_allocated``).
        reserved: What was taken from the device (``torch.cuda.memory_reserved``).
        peak_requested, peak_allocated, peak_reserved: The most of each; each may have been there at another moment.
        flushes: How often everything that was free was given back to the device because a request did not fit
            (``num_alloc_retries``). Each one waits for the device.
        out_of_memory: Index of the event of a simulation that could not be served, where it ended after all that can be
            given back was given back; None if it ran through.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self.requested = self.allocated = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0
        self.flushes = 0
        self.out_of_memory: int | None = None
        self._settings = settings
        self._pools: tuple[dict[str, Pool], dict[str, Pool]] = ({}, {})
        self._living: dict[int, Block | None] = {}
        self._next_address = 0
        self._searches: tuple[list[int], list[int]] = ([0], [0])
        self._least_rest = (
            _LARGE_REST_BYTES if not settings.expandable_segments else _SMALL_REST_BYTES,
            _SMALL_REST_BYTES,
        )
        divisions = settings.roundup_power2_divisions
        self._rounded: Callable[[int], int] | None = None
        if divisions is not None and divisions > 1:
            self._rounded = lambda nbytes: _rounded_to_divisions(nbytes, divisions)

    def malloc(self, identity: int, nbytes: int, stream: str) -> bool:
        """Serve a request; False, and there is no such allocation, if there is not enough memory."""
        if identity in self._living or nbytes < 0:
            raise ValueError(f"malloc of {nbytes} bytes as {identity}: sizes are not negative, identities used once")
        if not nbytes:
            self._living[identity] = None
            return True
        size = (nbytes + BLOCK_BYTES - 1) & -BLOCK_BYTES if self._rounded is None else self._rounded(nbytes)
        is_small = size <= SMALL_BYTES
        pool = self._pools[is_small].get(stream)
        if pool is None:
            pool = self._new_pool(stream, is_small)
        block = self._find(pool, size) or self._take_from_device(pool, size)
        if block is None:
            return False
        if block.size - size >= self._least_rest[is_small] and self._may_split(size):
            split(block, size)
        block.requested = nbytes
        self._living[identity] = block
        self.requested += nbytes
        self.allocated += block.size
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return True

    def free(self, identity: int) -> None:
        """Take an allocation back."""
        block = self._block(identity)
        del self._living[identity]
        if block is not None:
            self._recover(block)

    def flush(self) -> None:
        """Give everything back that is free in whole segments or pages."""
        for pools in self._pools:  # large blocks first
            for pool in pools.values():
                for block in pool.blocks():
                    if self._settings.expandable_segments:
                        self.reserved -= unmap(block)
                    elif block.is_whole:
                        self._give_back(block)

    def _block(self, identity: int) -> Block | None:
        if identity not in self._living:
            raise ValueError(f"allocation {identity}: it was never made or is freed already")
        return self._living[identity]

    def _new_pool(self, stream: str, is_small: bool) -> Pool:
        pages = SMALL_SEGMENT_BYTES if is_small else self._settings.large_segment_bytes
        pool = self._pools[is_small][stream] = Pool(stream, is_small, pages, self._searches[is_small])
        return pool

    def _find(self, pool: Pool, size: int) -> Block | None:
        """The best free block, if one will do."""
        limit, is_expandable = self._settings.max_split_bytes, self._settings.expandable_segments
        pool.searches[0] += 1
        if limit is None and not is_expandable:
            return pool.take(size)
        block = best_fit(pool, size) if is_expandable else pool.smallest(size)
        if block is None or (limit is not None and block.size >= (limit if size < limit else size + _OVERSIZE_BYTES)):
            return None
        pool.remove(block)
        return block

    def _may_split(self, size: int) -> bool:
        limit = self._settings.max_split_bytes
        return limit is None or self._settings.expandable_segments or size <= SMALL_BYTES or size < limit

    def _take_from_device(self, pool: Pool, size: int) -> Block | None:
        """New memory: as it is, after giving back what might suffice, after giving back all; None if there is none."""
        if self._settings.garbage_collection_threshold is not None:
            self._collect(self._settings.garbage_collection_threshold)
        block = self._new_segment(pool, size)
        if block is None and self._settings.max_split_bytes is not None and self._release_oversize(pool, size):
            block = self._new_segment(pool, size)
        if block is None:
            self.flush()
            self.flushes += 1
            block = self._new_segment(pool, size)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        if self._settings.expandable_segments:
            return self._grow(pool, size)
        nbytes = pool.segment_for(size)
        return self._new_block(pool, nbytes) if self._reserve(nbytes) else None

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Map memory for a request that no free block can serve, next to free memory where there is some.

        Returns:
            A block of at least ``size`` bytes, in no pool; None if the device has no memory left, where pages that were
            mapped meanwhile stay, as free blocks.
        """
        block = _lowest_range(pool, size)
        if block is None:
            block = self._new_range(pool, size)
            pool.unmapped.append(block)  # the highest address
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None  # `_lowest_range` saw to it
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Give the beginning of an unmapped block memory for ``size`` bytes, in whole pages, and free it."""
        pool, page = block.pool, block.pool.segment_bytes
        mapped = -(-size // page) * page
        if not self._reserve(mapped):
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

    def _new_range(self, pool: Pool, size: int) -> Block:
        capacity, page = self._settings.capacity_bytes, pool.segment_bytes
        # 1 1/8 of the device's memory: pages may have to be unmapped early in the range and mapped at its end.
        room = _ADDRESSES if capacity is None else max(capacity + capacity // 8, size)
        self._next_address = -(-self._next_address // page) * page
        block = self._new_block(pool, -(-room // page) * page)
        block.is_mapped = False
        return block

    def _new_block(self, pool: Pool, nbytes: int) -> Block:
        block = Block(pool, self._next_address, nbytes)
        self._next_address += nbytes
        return block

    def _reserve(self, nbytes: int) -> bool:
        capacity = self._settings.capacity_bytes
        if capacity is not None and self.reserved + nbytes > capacity:
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _recover(self, block: Block) -> None:
        """Put a block that nobody uses any more back into its pool."""
        self.allocated -= block.size
        self.requested -= block.requested
        block.pool.free(block)

    def _give_back(self, block: Block) -> None:
        """Return a whole segment to the device."""
        block.pool.remove(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back blocks that are too large to be split, as many as the request needs; whether that may do."""
        limit = self._settings.max_split_bytes
        assert limit is not None
        if self._settings.expandable_segments:
            return False
        wanted = max(size, limit)
        index = pool.first(wanted)
        if index < len(pool):
            self._give_back(pool.at(index))
            return True
        released = 0
        while len(pool) and released < wanted and pool.at(len(pool) - 1).size >= limit:
            largest = pool.at(len(pool) - 1)
            released += largest.size
            self._give_back(largest)
        return released >= wanted

    def _collect(self, threshold: float) -> None:
        """Give back whole segments that have been free for longer than the average."""
        assert self._settings.capacity_bytes is not None
        excess = self.reserved - int(threshold * self._settings.capacity_bytes)
        if excess <= 0 or self._settings.expandable_segments:
            return
        idle = [block for pool in self._pools[False].values() for block in pool.blocks() if block.is_whole]
        while excess > 0 and idle:
            average = sum(_age(block) for block in idle) / len(idle)
            for block in [block for block in idle if _age(block) >= average]:
                excess -= block.size
                idle.remove(block)
                self._give_back(block)


def _age(block: Block) -> int:
    """How often its pool was searched since the block became free."""
    return block.pool.searches[0] - block.since


def _rounded_to_divisions(nbytes: int, divisions: int) -> int:
    """The next of ``divisions`` equal steps between powers of two; of 512 bytes where those would be finer."""
    if nbytes <= BLOCK_BYTES * divisions:
        return max(-(-nbytes // BLOCK_BYTES), 1) * BLOCK_BYTES
    step = (1 << (nbytes.bit_length() - 1)) // divisions
    return -(-nbytes // step) * step


# Segments are multiples of it, so nothing finer than this can decide whether a request fits.
_STEP_BYTES = 2 << 20


def simulate_allocator(events: Iterable[MemoryEvent], settings: AllocatorSettings | None = None) -> CachingAllocator:
    """The caching allocator behind some events.

    Raises:
        ValueError: If an event names an allocation that does not exist, or makes one that does.
    """
    device = CachingAllocator(settings or AllocatorSettings())
    for index, (kind, identity, nbytes, stream) in enumerate(events):
        if kind == "free":
            device.free(identity)
        elif not device.malloc(identity, nbytes, stream):
            device.out_of_memory = index
            break
    return device


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
    enough, too_little = simulate_allocator(events, free_of_limits).peak_reserved, 0
    while enough - too_little > _STEP_BYTES:
        middle = too_little + (enough - too_little) // _STEP_BYTES // 2 * _STEP_BYTES
        result = simulate_allocator(events, replace(free_of_limits, capacity_bytes=middle))
        if result.out_of_memory is None:
            enough = middle
        else:
            too_little = middle
    return enough


# Expandable segments: ranges of addresses that get memory page by page, where a request needs it.
#
# One range per pool grows at its end; pages are given back only when the allocator gives back all it can. After
# ``c10/cuda/CUDACachingAllocator.cpp`` of torch (``find_expandable_block``, ``map_block``, ``unmap_block``).


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
