"""Expandable segments against a plain list of ranges of addresses, searched from end to end."""

from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings, MemoryEvent, free, malloc
from lightning_mist.estimate.allocator.device_allocator import CachingAllocator, simulate_allocator
from tests.cost.allocator_traces import MIB, reserved
from tests.tiers import examples

ADDRESSES = 1 << 47


def test_an_expandable_segment_grows_where_its_free_end_is() -> None:
    expandable = {"expandable_segments": True}
    assert reserved(malloc(0, 30 * MIB), **expandable) == 40 * MIB  # pages of 20 MiB
    # The free 10 MiB at the end serve the next request together with two new pages.
    assert reserved(malloc(0, 30 * MIB), malloc(1, 40 * MIB), **expandable) == 80 * MIB
    # Freed neighbours grow together: what fragments segments does not fragment a range.
    apart = [malloc(0, 30 * MIB), malloc(1, 40 * MIB), free(0), free(1), malloc(2, 75 * MIB)]
    assert reserved(*apart, **expandable) == 80 * MIB
    assert reserved(*apart) == 146 * MIB
    # Blocks are cut exactly, whatever remains.
    assert simulate_allocator([malloc(0, 13 * MIB)], AllocatorSettings(**expandable)).peak_allocated == 13 * MIB


def test_an_expandable_segment_gives_back_whole_pages_and_maps_them_again_elsewhere() -> None:
    # Pages of 20 MiB at 0, 20, 40; 10 MiB live in the first, 5 MiB in the last: only the middle page is given back.
    events = [malloc(0, 10 * MIB), malloc(1, 40 * MIB), malloc(2, 5 * MIB), free(1), malloc(3, 45 * MIB)]
    setup = AllocatorSettings(capacity_bytes=80 * MIB, expandable_segments=True)
    result = simulate_allocator(events, setup)
    assert result.out_of_memory is None
    assert (result.flushes, result.reserved) == (1, 80 * MIB)
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=79 * MIB, expandable_segments=True))
    assert result.out_of_memory is not None


class PlainRange:
    """One range of addresses as a list of ``[start, end, state]``; states are a name, ``"free"`` or ``"unmapped"``."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.parts: list[list[object]] = []

    def mapped(self) -> int:
        return sum(end - start for start, end, state in self.parts if state != "unmapped")  # type: ignore[operator]

    def allocated(self) -> int:
        return sum(
            end - start  # type: ignore[operator]
            for start, end, state in self.parts
            if state not in ("free", "unmapped")
        )

    def set(self, start: int, end: int, state: object) -> None:
        """Give a stretch a state, and join equal neighbours that are free or unmapped."""
        pieces: list[list[object]] = []
        for low, high, before in self.parts:
            for first, last, now in (
                (low, min(high, start), before),  # type: ignore[type-var]
                (max(low, start), min(high, end), state),  # type: ignore[type-var]
                (max(low, end), high, before),  # type: ignore[type-var]
            ):
                if first < last:  # type: ignore[operator]
                    pieces.append([first, last, now])
        joined: list[list[object]] = []
        for piece in pieces:
            if joined and joined[-1][2] == piece[2] and piece[2] in ("free", "unmapped"):
                joined[-1][1] = piece[1]
            else:
                joined.append(piece)
        self.parts = joined

    def best(self, size: int) -> int | None:
        """Where the best free stretch begins; one that can grow counts with the addresses it could grow into."""
        grown = {}
        for part, following in pairwise([*self.parts, [0, 0, "end"]]):
            more = following[1] - following[0] if following[2] == "unmapped" else 0  # type: ignore[operator]
            grown[part[0]] = part[1] - part[0] + more  # type: ignore[operator]
        fitting = sorted(
            (end - start, start)  # type: ignore[operator]
            for start, end, state in self.parts
            if state == "free" and end - start >= size  # type: ignore[operator]
        )
        chosen = None
        for _, start in fitting:
            if chosen is not None and grown[start] >= grown[chosen]:
                break
            chosen = start
        return chosen  # type: ignore[return-value]

    def room(self, size: int) -> int | None:
        """Where the first stretch of free and unmapped addresses begins that has room and something unmapped to map."""
        start = None
        total = 0
        for low, high, state in self.parts:
            if state not in ("free", "unmapped"):
                start, total = None, 0
                continue
            # A stretch begins at what is unmapped, or at what is free right before it.
            start = low if start is None else start
            total += high - low  # type: ignore[operator]
            if total >= size:
                return start  # type: ignore[return-value]
        return None


class PlainExpandable:
    """The rules for one pool of one stream."""

    def __init__(self, page: int, capacity: float) -> None:
        self.range, self.page, self.capacity, self.flushes = PlainRange(page), page, capacity, 0

    def malloc(self, name: int, nbytes: int) -> bool:
        size = -(-nbytes // 512) * 512
        start = self.range.best(size)
        if start is None:
            start = self._map(size)
        if start is None:
            self._flush()
            start = self._map(size)
        if start is None:
            return False
        self.range.set(start, start + size, name)
        return True

    def free(self, name: int) -> None:
        low, high = next((low, high) for low, high, state in self.range.parts if state == name)
        self.range.set(low, high, "free")  # type: ignore[arg-type]

    def _map(self, size: int) -> int | None:
        if not self.range.parts:
            top = ADDRESSES if self.capacity == float("inf") else int(self.capacity) * 9 // 8
            self.range.parts = [[0, -(-max(top, size) // self.page) * self.page, "unmapped"]]
        start = self.range.room(size)
        if start is None:
            # A second range would be begun, for which there must be memory; such traces are too rare to follow.
            assume(self.range.mapped() + size > self.capacity)
            return None
        while True:
            gap = next(
                (
                    (low, high)
                    for low, high, state in self.range.parts
                    if state == "unmapped" and high > start and low < start + size  # type: ignore[operator]
                ),
                None,
            )
            if gap is None:
                return start
            low, high = gap
            wanted = min(start + size, high) - low  # type: ignore[operator, type-var]
            pages = -(-wanted // self.page) * self.page
            if self.range.mapped() + pages > self.capacity:
                return None
            self.range.set(low, low + pages, "free")  # type: ignore[arg-type, operator]

    def _flush(self) -> None:
        self.flushes += 1
        for low, high, state in list(self.range.parts):
            if state == "free":
                first = -(-low // self.page) * self.page  # type: ignore[operator]
                end = high // self.page * self.page  # type: ignore[operator]
                if first < end:
                    self.range.set(first, end, "unmapped")
        if all(state == "unmapped" for _, _, state in self.range.parts):
            self.range.parts = []


@st.composite
def traces(draw: st.DrawFn) -> list[MemoryEvent]:
    events: list[MemoryEvent] = []
    living: list[int] = []
    for name in range(draw(st.integers(1, 30))):
        while living and draw(st.integers(0, 2)) == 0:
            events.append(free(living.pop(draw(st.integers(0, len(living) - 1)))))
        events.append(malloc(name, draw(st.integers(MIB + 1, 70 * MIB))))
        living.append(name)
    return events


@settings(max_examples=examples(200))
@given(traces(), st.sampled_from([None, 80 * MIB, 150 * MIB, 300 * MIB]))
def test_every_step_agrees_with_a_plain_list(trace: list[MemoryEvent], capacity: int | None) -> None:
    device = CachingAllocator(AllocatorSettings(capacity_bytes=capacity, expandable_segments=True))
    plain = PlainExpandable(20 * MIB, capacity or float("inf"))
    for event in trace:
        if event.kind == "malloc":
            served = device.malloc(event.identity, event.nbytes, event.stream)
            assert served == plain.malloc(event.identity, event.nbytes)
            if not served:
                break
        else:
            device.free(event.identity)
            plain.free(event.identity)
        found = (device.reserved, device.allocated, device.flushes)
        assert found == (plain.range.mapped(), plain.range.allocated(), plain.flushes)
