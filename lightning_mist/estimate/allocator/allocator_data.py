"""What goes into a simulation of torch's caching allocator: events, settings; and the blocks that it works on."""

import difflib
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

MIB = 1 << 20

EventKind = Literal["malloc", "free"]


class MemoryEvent(NamedTuple):
    """One thing that a program asks of the allocator.

    A tuple, because a step has tens of thousands of them. Made by :func:`malloc` and :func:`free`.

    Attributes:
        identity: Which allocation; unique among the living.
        nbytes: Bytes asked for; 0 for ``"free"``.
        stream: The stream that allocates; empty for ``"free"``.
    """

    kind: EventKind
    identity: int
    nbytes: int = 0
    stream: str = ""


def malloc(identity: int, nbytes: int, stream: str = "compute") -> MemoryEvent:
    """``stream`` allocates ``nbytes`` bytes."""
    return MemoryEvent("malloc", identity, nbytes, stream)


def free(identity: int) -> MemoryEvent:
    """The last reference to an allocation is gone."""
    return MemoryEvent("free", identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How the allocator is set up; the defaults are torch's.

    Attributes:
        capacity_bytes: Device memory that the allocator may reserve; None for no limit. What lies outside of it
            (context, communicators, other processes) must have been taken off.
        expandable_segments: ``expandable_segments:True`` of ``PYTORCH_CUDA_ALLOC_CONF`` (torch 2.1 and later): one
            growing range of addresses per stream and pool, mapped page by page.
        max_split_bytes: ``max_split_size_mb`` in bytes: larger blocks are neither split nor given to smaller requests.
            None for no limit.
        garbage_collection_threshold: Fraction of the capacity above which blocks that have long been free are given
            back, as under ``torch.cuda.set_per_process_memory_fraction``; None never.
        roundup_power2_divisions: Sizes are rounded up to this many steps between powers of two (a power of two);
            None for multiples of 512 bytes.
        large_segment_bytes: Segment for requests above 1 MiB and below 10 MiB, and the page of expandable segments
            (``large_segment_size_mb`` of later torch versions; 20 MiB otherwise).

    Raises:
        ValueError: If the allocator would refuse the settings.
    """

    capacity_bytes: int | None = None
    expandable_segments: bool = False
    max_split_bytes: int | None = None
    garbage_collection_threshold: float | None = None
    roundup_power2_divisions: int | None = None
    large_segment_bytes: int = 20 * MIB

    def __post_init__(self) -> None:
        """Check the settings as torch does when it reads them."""
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ValueError(f"capacity_bytes = {self.capacity_bytes}: a device has at least 1 byte; None for no limit")
        if self.large_segment_bytes < 10 * MIB or self.large_segment_bytes % (2 * MIB):
            raise ValueError(
                f"large_segment_bytes = {self.large_segment_bytes}: it must be a multiple of 2 MiB, at least 10 MiB"
            )
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise ValueError(
                f"max_split_bytes = {self.max_split_bytes}: it must be at least the segment for large blocks, "
                f"{self.large_segment_bytes}"
            )
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0.0 < threshold < 1.0:
            raise ValueError(f"garbage_collection_threshold = {threshold}: it is a fraction between 0 and 1")
        if threshold is not None and self.capacity_bytes is None:
            raise ValueError(
                f"garbage_collection_threshold = {threshold} without capacity_bytes: it is a fraction of the capacity"
            )
        divisions = self.roundup_power2_divisions
        if divisions is not None and (divisions < 1 or divisions & (divisions - 1)):
            raise ValueError(f"roundup_power2_divisions = {divisions}: it must be a power of two")


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("True or False is needed")
    return text == "True"


def _mebibytes(text: str) -> int:
    return int(text) * MIB


_KNOWN: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "roundup_power2_divisions": ("roundup_power2_divisions", int),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
}
"""What changes how much is reserved: field and reader by torch's name."""

_WITHOUT_EFFECT = frozenset(
    ("backend", "pinned_use_background_threads", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc")
)
"""What does not change it. (Of ``backend`` only the native one is simulated.)"""


def parse_allocator_settings(text: str, capacity_bytes: int | None = None) -> AllocatorSettings:
    """Settings from text such as ``"expandable_segments:True,max_split_size_mb:512"``.

    Args:
        text: As in ``PYTORCH_CUDA_ALLOC_CONF``; nothing for torch's defaults.

    Raises:
        ValueError: If a name is not known or a value not one for it; the message names the nearest name.
    """
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition(":"))
        if name == "backend" and value != "native":
            raise ValueError(f"allocator setting {item!r}: only torch's native allocator is simulated; leave it out")
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"allocator setting {name!r} is not one of {', '.join(_KNOWN)}, which are simulated: the nearest is "
                f"{near}"
            )
        field, read = _KNOWN[name]
        try:
            found[field] = read(value)
        except ValueError as error:
            raise ValueError(f"allocator setting {item!r}: {value!r} is no value for {name}: {error}") from None
    return AllocatorSettings(capacity_bytes=capacity_bytes, **found)


# Blocks of device memory and the pools in which free ones wait for the next request.
#
# A *segment* is what was taken from the device in one piece. It is cut into *blocks*, which know their neighbours in
# the segment. Free blocks of one stream and size class lie in a *pool*, ordered by size, then address: best fit is a
# binary search. After ``c10/cuda/CUDACachingAllocator.cpp`` of torch (``Block``, ``BlockPool``, ``try_merge_blocks``).


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
