"""One device's allocator: settings worked by hand, and any trace against plain lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.estimate.allocator.allocator_data import (
    AllocatorSettings,
    MemoryEvent,
    free,
    malloc,
)
from lightning_mist.estimate.allocator.device_allocator import CachingAllocator, simulate_allocator
from tests.cost.allocator_traces import KIB, MIB, reserved, traces
from tests.tiers import examples


def test_a_large_block_is_split_only_if_more_than_1_mib_remains() -> None:
    # 13 MiB in a segment of 14 MiB: the rest of 1 MiB stays with the block.
    result = simulate_allocator([malloc(0, 13 * MIB)])
    assert result.peak_allocated == result.peak_reserved == 14 * MIB
    # 13 MiB less 512 bytes leave 1 MiB and 512 bytes: split.
    result = simulate_allocator([malloc(0, 13 * MIB - 512)])
    assert result.peak_allocated == 13 * MIB - 512


def test_what_is_too_large_to_be_split_serves_only_what_is_nearly_as_large() -> None:
    limited = {"max_split_bytes": 32 * MIB}
    large = [malloc(0, 60 * MIB), free(0)]
    assert reserved(*large, malloc(1, 30 * MIB), **limited) == 90 * MIB  # not from the 60
    assert reserved(*large, malloc(1, 42 * MIB), **limited) == 60 * MIB  # unsplit: 18 MiB more than asked for
    assert reserved(*large, malloc(1, 40 * MIB), **limited) == 100 * MIB  # 20 MiB more is too much
    result = simulate_allocator([*large, malloc(1, 42 * MIB)], AllocatorSettings(max_split_bytes=32 * MIB))
    assert result.allocated == 60 * MIB


def test_blocks_too_large_to_be_split_are_given_back_before_all_others() -> None:
    # At 150 MiB, 40 MiB need only the free 60 MiB back; the free 20 MiB stay reserved.
    events = [malloc(0, 60 * MIB), malloc(1, 60 * MIB), malloc(2, 20 * MIB), free(0), free(2), malloc(3, 40 * MIB)]
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=150 * MIB, max_split_bytes=32 * MIB))
    assert (result.reserved, result.flushes) == (120 * MIB, 0)
    # Several of them where one does not suffice, the largest first.
    events = [malloc(0, 40 * MIB), malloc(1, 50 * MIB), malloc(2, 40 * MIB), free(0), free(1), free(2)]
    setup = AllocatorSettings(capacity_bytes=150 * MIB, max_split_bytes=32 * MIB)
    result = simulate_allocator([*events, malloc(3, 80 * MIB)], setup)
    assert (result.reserved, result.flushes) == (120 * MIB, 0)


def test_blocks_that_have_long_been_free_are_collected_above_the_threshold() -> None:
    # 30 MiB stay free over three searches, 40 MiB over one: the average is 2, only the 30 MiB are older.
    events = [malloc(0, 30 * MIB), malloc(1, 40 * MIB), free(0), malloc(2, 24 * MIB, "other"), malloc(3, 50 * MIB)]
    events += [free(1), malloc(4, 60 * MIB)]
    limited = {"capacity_bytes": 1000 * MIB}
    assert reserved(*events, **limited) == (30 + 40 + 24 + 50 + 60) * MIB
    result = simulate_allocator(events, AllocatorSettings(garbage_collection_threshold=0.12, **limited))
    assert result.reserved == (40 + 24 + 50 + 60) * MIB


def test_sizes_can_be_rounded_to_parts_of_powers_of_two() -> None:
    setup = AllocatorSettings(roundup_power2_divisions=4)
    sizes = [(1200, 1536), (5 * KIB, 5 * KIB), (1200 * KIB, 1280 * KIB), (4 * MIB, 4 * MIB), (4 * MIB + 1, 5 * MIB)]
    for asked, rounded in sizes:
        assert simulate_allocator([malloc(0, asked)], setup).peak_allocated == rounded


def test_events_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"malloc of 8 bytes as 0: .* identities used once"):
        simulate_allocator([malloc(0, 8), malloc(0, 8)])
    with pytest.raises(ValueError, match="sizes are not negative"):
        simulate_allocator([malloc(0, -1)])
    with pytest.raises(ValueError, match="allocation 1: it was never made or is freed already"):
        simulate_allocator([free(1)])


class PlainAllocator:
    """The same rules over plain lists that are searched from end to end; no order is kept, no neighbour remembered."""

    def __init__(self, capacity: float, limit: float) -> None:
        self.capacity, self.limit = capacity, limit
        # Each segment: stream, whether small, and its blocks as [address, size, name or None].
        self.segments: list[tuple[str, bool, list[list[int | None]]]] = []
        self.top = 0
        self.flushes = 0

    def reserved(self) -> int:
        return sum(size or 0 for _, _, blocks in self.segments for _, size, _ in blocks)

    def allocated(self) -> int:
        return sum(size or 0 for _, _, blocks in self.segments for _, size, name in blocks if name is not None)

    def _free(self, stream: str, small: bool) -> list[tuple[int, int, list[list[int | None]], int]]:
        return sorted(
            (size, address, blocks, place)  # type: ignore[misc]
            for owner, kind, blocks in self.segments
            if (owner, kind) == (stream, small)
            for place, (address, size, name) in enumerate(blocks)
            if name is None
        )

    def malloc(self, name: int, nbytes: int, stream: str) -> bool:
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        for found, address, blocks, place in self._free(stream, small):
            if found < size:
                continue
            if found >= (self.limit if size < self.limit else size + 20 * MIB):
                break
            rest = found - size
            if rest >= 512 if small else rest > MIB and size < self.limit:
                blocks[place : place + 1] = [[address, size, name], [address + size, rest, None]]
            else:
                blocks[place][2] = name
            return True
        segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        is_over = self.reserved() + segment > self.capacity
        if is_over and self.limit < float("inf"):
            # Where it drops less than was asked for, all goes, although there may be room by now.
            is_over = not self._drop_oversize(stream, small, size) or self.reserved() + segment > self.capacity
        if is_over:
            self.segments = [entry for entry in self.segments if len(entry[2]) > 1 or entry[2][0][2] is not None]
            self.flushes += 1
        if self.reserved() + segment > self.capacity:
            return False
        self.segments.append((stream, small, [[self.top, segment, None]]))
        self.top += segment
        blocks = self.segments[-1][2]
        rest = segment - size
        if rest >= 512 if small else rest > MIB and size < self.limit:
            blocks[:] = [[self.top - segment, size, name], [self.top - rest, rest, None]]
        else:
            blocks[0][2] = name
        return True

    def _drop_oversize(self, stream: str, small: bool, size: int) -> bool:
        wanted = max(size, self.limit)
        oversize = [entry for entry in self._free(stream, small) if entry[0] >= self.limit]
        enough = [entry for entry in oversize if entry[0] >= wanted]
        chosen, total = enough[:1], 0
        if not enough:
            for entry in reversed(oversize):
                if total < wanted:
                    chosen, total = [*chosen, entry], total + entry[0]
        gone = [id(entry[2]) for entry in chosen]
        self.segments = [entry for entry in self.segments if id(entry[2]) not in gone]
        return bool(enough) or total >= wanted

    def free(self, name: int) -> None:
        for _, _, blocks in self.segments:
            for block in blocks:
                if block[2] == name:
                    block[2] = None
            merged: list[list[int | None]] = []
            for block in blocks:
                if merged and merged[-1][2] is None and block[2] is None:
                    merged[-1][1] += block[1]  # type: ignore[operator]
                else:
                    merged.append(block)
            blocks[:] = merged


@settings(max_examples=examples(150))
@given(traces(), st.sampled_from([None, 80 * MIB, 200 * MIB]), st.sampled_from([None, 24 * MIB]))
def test_every_step_agrees_with_plain_lists(trace: list[MemoryEvent], capacity: int | None, limit: int | None) -> None:
    device = CachingAllocator(AllocatorSettings(capacity_bytes=capacity, max_split_bytes=limit))
    plain = PlainAllocator(capacity or float("inf"), limit or float("inf"))
    for event in trace:
        if event.kind == "malloc":
            served = device.malloc(event.identity, event.nbytes, event.stream)
            assert served == plain.malloc(event.identity, event.nbytes, event.stream)
            if not served:
                break
        else:
            device.free(event.identity)
            plain.free(event.identity)
        assert (device.reserved, device.allocated, device.flushes) == (
            plain.reserved(),
            plain.allocated(),
            plain.flushes,
        )


SETUPS = st.builds(
    AllocatorSettings,
    capacity_bytes=st.sampled_from([None, 100 * MIB, 300 * MIB]),
    expandable_segments=st.booleans(),
    max_split_bytes=st.sampled_from([None, 24 * MIB]),
    roundup_power2_divisions=st.sampled_from([None, 8]),
)


@settings(max_examples=examples(150))
@given(traces(), SETUPS)
def test_what_is_reserved_covers_what_is_allocated_and_stays_within_the_capacity(
    trace: list[MemoryEvent], setup: AllocatorSettings
) -> None:
    device = CachingAllocator(setup)
    living: set[int] = set()
    for event in trace:
        if event.kind == "malloc":
            if not device.malloc(event.identity, event.nbytes, event.stream):
                break
            living.add(event.identity)
        else:
            device.free(event.identity)
            living.discard(event.identity)
        assert device.requested <= device.allocated <= device.reserved
        assert setup.capacity_bytes is None or device.reserved <= setup.capacity_bytes
    for identity in living:
        device.free(identity)
    device.flush()
    assert (device.requested, device.allocated, device.reserved) == (0, 0, 0)
