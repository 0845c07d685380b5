"""Blocks of device memory and the pools in which free ones wait for the next request.

A *segment* is what was taken from the device in one piece. It is cut into *blocks*, which know their neighbours in the
segment. Free blocks of one stream and size class lie in a *pool*, ordered by size, then address: best fit is a binary
search. After ``c10/cuda/CUDACachingAllocator.cpp`` of torch (``Block``, ``BlockPool``, ``try_merge_blocks``).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from lightning_mist.estimate.allocator.allocator_data import MIB

# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge.
BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_STEP_BYTES = 2 * MIB

# Keys of free blocks are `size << _ADDRESS_BITS | address`: one integer orders by both. Devices have addresses of 49
# bits, but ours are never reused and may grow beyond.
_ADDRESS_BITS = 72


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment.

    Attributes:
        address: Of its first byte; unique over all segments.
        requested: What the tensor in it asked for.
        is_mapped: False for the part of an expandable segment that has no memory.
        streams: Other streams that use it; None for none.
        since: Number of searches when it became free.
    """

    pool: "Pool"
    address: int
    size: int
    requested: int = 0
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = False
    is_mapped: bool = True
    streams: set[str] | None = None
    since: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None

    def put_before(self, piece: "Block") -> None:
        """Make a piece the neighbour below."""
        piece.before, piece.after = self.before, self
        if self.before is not None:
            self.before.after = piece
        self.before = piece

    def put_after(self, piece: "Block") -> None:
        """Make a piece the neighbour above."""
        piece.before, piece.after = self, self.after
        if self.after is not None:
            self.after.before = piece
        self.after = piece

    def swallow(self, neighbour: "Block") -> None:
        """Make a neighbour a part of this block."""
        self.size += neighbour.size
        if neighbour is self.before:
            self.address, self.before = neighbour.address, neighbour.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = neighbour.after
            if self.after is not None:
                self.after.before = self


@dataclass(slots=True, eq=False)
class Pool:
    """The free blocks of one stream and size class.

    Attributes:
        is_small: Whether it serves requests up to 1 MiB.
        segment_bytes: What is taken from the device for a request too small for a segment of its own; the page of
            expandable segments.
        searches: One number that pools of a size class share: how often a block was looked for.
        unmapped: Parts of expandable segments without memory, by address.
    """

    stream: str
    is_small: bool
    segment_bytes: int
    searches: list[int]
    unmapped: list[Block] = field(default_factory=list)
    _keys: list[int] = field(default_factory=list)
    _blocks: dict[int, Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        """Put a free block in."""
        key = block.size << _ADDRESS_BITS | block.address
        insort(self._keys, key)
        self._blocks[key] = block
        block.is_free = True
        block.since = self.searches[0]

    def remove(self, block: Block) -> None:
        """Take a given block out."""
        key = block.size << _ADDRESS_BITS | block.address
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]
        block.is_free = False

    def take(self, size: int) -> Block | None:
        """Take out the smallest block of at least ``size`` bytes, of equal ones the one with the lowest address."""
        keys = self._keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        block = self._blocks.pop(keys.pop(index))
        block.is_free = False
        return block

    def smallest(self, size: int) -> Block | None:
        """What :meth:`take` would take out, left in."""
        index = self.first(size)
        return self.at(index) if index < len(self._keys) else None

    def first(self, size: int) -> int:
        """Index of the smallest free block of at least ``size`` bytes; as many as there are blocks if there is none."""
        return bisect_left(self._keys, size << _ADDRESS_BITS)

    def at(self, index: int) -> Block:
        """The free block at a place in the order of sizes."""
        return self._blocks[self._keys[index]]

    def __len__(self) -> int:
        """Number of free blocks."""
        return len(self._keys)

    def blocks(self) -> tuple[Block, ...]:
        """The free blocks, by size, then address."""
        return tuple(self._blocks[key] for key in self._keys)

    def segment_for(self, size: int) -> int:
        """Bytes to take from the device for a request of ``size`` bytes."""
        if self.is_small or size < OWN_SEGMENT_BYTES:
            return self.segment_bytes
        return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES

    def free(self, block: Block) -> None:
        """Put a block back, as one with free neighbours."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self.remove(neighbour)
                block.swallow(neighbour)
        self.add(block)


def split(block: Block, size: int) -> None:
    """Cut a block to ``size`` bytes; the rest becomes a free block behind it."""
    rest = Block(block.pool, block.address + size, block.size - size)
    block.put_after(rest)
    block.size = size
    block.pool.add(rest)
