"""The caching allocator: traces worked by hand from the algorithm, and properties of any trace."""

import pytest

from lightning_mist.cost.allocator import (
    AllocatorSettings,
    LeastCapacity,
    MemoryEvent,
    StreamBytes,
    finish,
    free,
    least_capacity,
    malloc,
    simulate_allocator,
    use,
)

KIB, MIB = 1 << 10, 1 << 20


def reserved(*events: MemoryEvent, **settings: object) -> int:
    return simulate_allocator(events, AllocatorSettings(**settings)).peak.reserved  # type: ignore[arg-type]


def test_requests_are_rounded_to_512_bytes() -> None:
    result = simulate_allocator([malloc(0, 1), malloc(1, 513)])
    assert (result.peak.requested, result.peak.allocated) == (514, 512 + 1024)


def test_small_requests_share_a_segment_of_2_mib() -> None:
    assert reserved(malloc(0, MIB), malloc(1, MIB)) == 2 * MIB
    assert reserved(malloc(0, MIB), malloc(1, MIB), malloc(2, 1)) == 4 * MIB


def test_requests_below_10_mib_share_a_segment_of_20_mib() -> None:
    assert reserved(malloc(0, MIB + 1)) == 20 * MIB
    assert reserved(malloc(0, 9 * MIB), malloc(1, 9 * MIB)) == 20 * MIB
    assert reserved(malloc(0, 9 * MIB), malloc(1, 9 * MIB), malloc(2, 3 * MIB)) == 40 * MIB


def test_requests_from_10_mib_on_get_segments_of_their_own_in_steps_of_2_mib() -> None:
    assert reserved(malloc(0, 10 * MIB)) == 10 * MIB
    assert reserved(malloc(0, 10 * MIB + 1)) == 12 * MIB


def test_a_large_block_is_split_only_if_more_than_1_mib_remains() -> None:
    # 13 MiB in a segment of 14 MiB: the rest of 1 MiB stays with the block.
    result = simulate_allocator([malloc(0, 13 * MIB)])
    assert result.peak.allocated == result.peak.reserved == 14 * MIB
    # 13 MiB less 512 bytes leave 1 MiB and 512 bytes: split.
    result = simulate_allocator([malloc(0, 13 * MIB - 512)])
    assert result.peak.allocated == 13 * MIB - 512


def test_the_smallest_block_that_fits_is_taken_and_its_neighbours_come_back_together() -> None:
    # Two free segments of 30 and 40 MiB; 25 MiB are cut from the smaller, whose rest of 5 MiB serves 4 MiB.
    start = [malloc(0, 40 * MIB), malloc(1, 30 * MIB), free(0), free(1), malloc(2, 25 * MIB), malloc(3, 4 * MIB)]
    assert reserved(*start) == 70 * MIB
    # Then 40 MiB are still whole, and 30 MiB are again after both parts are freed, in either order.
    for order in ([free(2), free(3)], [free(3), free(2)]):
        assert reserved(*start, *order, malloc(4, 40 * MIB), malloc(5, 30 * MIB)) == 70 * MIB
    assert reserved(*start, free(3), malloc(4, 40 * MIB), malloc(5, 30 * MIB)) == 100 * MIB


def test_streams_do_not_share_what_is_free() -> None:
    events = [malloc(0, 30 * MIB), free(0), malloc(1, 30 * MIB, "gather"), free(1), malloc(2, KIB, "gather")]
    result = simulate_allocator(events)
    assert result.streams == (
        StreamBytes(stream="compute", is_small=False, reserved=30 * MIB),
        StreamBytes(stream="gather", is_small=False, reserved=30 * MIB),
        StreamBytes(stream="gather", is_small=True, reserved=2 * MIB),
    )
    assert result.peak.reserved == 62 * MIB
    assert result.peak.allocated == 30 * MIB


def test_memory_that_another_stream_uses_waits_for_it() -> None:
    used = [malloc(0, 30 * MIB), use(0, "gather"), free(0)]
    result = simulate_allocator([*used, malloc(1, 30 * MIB)])
    assert (result.peak.allocated, result.peak.active, result.peak.reserved) == (30 * MIB, 60 * MIB, 60 * MIB)
    result = simulate_allocator([*used, finish("other"), malloc(1, 30 * MIB)])
    assert result.peak.reserved == 60 * MIB
    result = simulate_allocator([*used, finish("gather"), malloc(1, 30 * MIB)])
    assert result.peak.active == result.peak.reserved == 30 * MIB
    # Its own stream is no other one.
    assert reserved(malloc(0, 30 * MIB), use(0, "compute"), free(0), malloc(1, 30 * MIB)) == 30 * MIB


def test_at_capacity_free_segments_are_given_back_and_waiting_memory_waited_for() -> None:
    events = [malloc(0, 30 * MIB), free(0), malloc(1, 40 * MIB)]
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=64 * MIB))
    assert (result.peak.reserved, result.flushes, result.out_of_memory) == (40 * MIB, 1, None)
    assert reserved(*events, capacity_bytes=70 * MIB) == 70 * MIB
    waiting = [malloc(0, 30 * MIB), use(0, "gather"), free(0), malloc(1, 40 * MIB)]
    assert reserved(*waiting, capacity_bytes=64 * MIB) == 40 * MIB


def test_a_segment_with_a_living_block_is_not_given_back() -> None:
    # 2 MiB of the segment of 20 MiB live: it stays, and 64 MiB have no room for 50 MiB more.
    events = [malloc(0, 2 * MIB), malloc(1, 9 * MIB), free(1), malloc(2, 50 * MIB)]
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=64 * MIB))
    assert result.out_of_memory is not None
    assert (result.out_of_memory.event, result.out_of_memory.nbytes) == (3, 50 * MIB)
    assert result.out_of_memory.held.reserved == 20 * MIB
    assert result.final.allocated == 2 * MIB
    assert result.flushes == 1


def test_what_is_too_large_to_be_split_serves_only_what_is_nearly_as_large() -> None:
    settings = {"max_split_bytes": 32 * MIB}
    large = [malloc(0, 60 * MIB), free(0)]
    assert reserved(*large, malloc(1, 30 * MIB), **settings) == 90 * MIB  # not from the 60
    assert reserved(*large, malloc(1, 42 * MIB), **settings) == 60 * MIB  # unsplit: 18 MiB more than asked for
    assert reserved(*large, malloc(1, 40 * MIB), **settings) == 100 * MIB  # 20 MiB more is too much
    result = simulate_allocator([*large, malloc(1, 42 * MIB)], AllocatorSettings(max_split_bytes=32 * MIB))
    assert result.final.allocated == 60 * MIB


def test_blocks_too_large_to_be_split_are_given_back_before_all_others() -> None:
    # At 150 MiB, 40 MiB need only the free 60 MiB back; the free 20 MiB stay reserved.
    events = [malloc(0, 60 * MIB), malloc(1, 60 * MIB), malloc(2, 20 * MIB), free(0), free(2), malloc(3, 40 * MIB)]
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=150 * MIB, max_split_bytes=32 * MIB))
    assert (result.final.reserved, result.flushes) == (120 * MIB, 0)
    # Several of them where one does not suffice, the largest first.
    events = [malloc(0, 40 * MIB), malloc(1, 50 * MIB), malloc(2, 40 * MIB), free(0), free(1), free(2)]
    settings = AllocatorSettings(capacity_bytes=150 * MIB, max_split_bytes=32 * MIB)
    result = simulate_allocator([*events, malloc(3, 80 * MIB)], settings)
    assert (result.final.reserved, result.flushes) == (120 * MIB, 0)


def test_blocks_that_have_long_been_free_are_collected_above_the_threshold() -> None:
    # 30 MiB stay free over three searches, 40 MiB over one: the average is 2, only the 30 MiB are older.
    events = [malloc(0, 30 * MIB), malloc(1, 40 * MIB), free(0), malloc(2, 24 * MIB, "other"), malloc(3, 50 * MIB)]
    events += [free(1), malloc(4, 60 * MIB)]
    limited = {"capacity_bytes": 1000 * MIB}
    assert reserved(*events, **limited) == (30 + 40 + 24 + 50 + 60) * MIB
    result = simulate_allocator(events, AllocatorSettings(garbage_collection_threshold=0.12, **limited))
    assert result.final.reserved == (40 + 24 + 50 + 60) * MIB


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
    assert simulate_allocator([malloc(0, 13 * MIB)], AllocatorSettings(**expandable)).peak.allocated == 13 * MIB


def test_an_expandable_segment_gives_back_whole_pages_and_maps_them_again_elsewhere() -> None:
    # Pages of 20 MiB at 0, 20, 40; 10 MiB live in the first, 5 MiB in the last: only the middle page is given back.
    events = [malloc(0, 10 * MIB), malloc(1, 40 * MIB), malloc(2, 5 * MIB), free(1), malloc(3, 45 * MIB)]
    settings = AllocatorSettings(capacity_bytes=80 * MIB, expandable_segments=True)
    result = simulate_allocator(events, settings)
    assert result.out_of_memory is None
    assert (result.flushes, result.final.reserved) == (1, 80 * MIB)
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=79 * MIB, expandable_segments=True))
    assert result.out_of_memory is not None


def test_sizes_can_be_rounded_to_parts_of_powers_of_two() -> None:
    settings = AllocatorSettings(roundup_power2_divisions=4)
    sizes = [(1200, 1536), (5 * KIB, 5 * KIB), (1200 * KIB, 1280 * KIB), (4 * MIB, 4 * MIB), (4 * MIB + 1, 5 * MIB)]
    for asked, given in sizes:
        assert simulate_allocator([malloc(0, asked)], settings).peak.allocated == given


def test_empty_tensors_take_no_memory() -> None:
    result = simulate_allocator([malloc(0, 0), free(0)])
    assert result.peak.reserved == 0
    assert result.final.allocated == 0


def test_events_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"malloc of 8 bytes as 0: .* identities used once"):
        simulate_allocator([malloc(0, 8), malloc(0, 8)])
    with pytest.raises(ValueError, match="sizes are not negative"):
        simulate_allocator([malloc(0, -1)])
    with pytest.raises(ValueError, match="allocation 1: it was never made or is freed already"):
        simulate_allocator([free(1)])
    with pytest.raises(ValueError, match="allocation 2"):
        simulate_allocator([use(2, "gather")])


def test_settings_that_the_allocator_would_refuse() -> None:
    with pytest.raises(ValueError, match=r"capacity_bytes = 0: .* None for no limit"):
        AllocatorSettings(capacity_bytes=0)
    with pytest.raises(ValueError, match=r"max_split_bytes = 1048576: .* 20971520"):
        AllocatorSettings(max_split_bytes=MIB)
    with pytest.raises(ValueError, match=r"garbage_collection_threshold = 1\.5"):
        AllocatorSettings(garbage_collection_threshold=1.5, capacity_bytes=1)
    with pytest.raises(ValueError, match="without capacity_bytes"):
        AllocatorSettings(garbage_collection_threshold=0.5)
    with pytest.raises(ValueError, match="roundup_power2_divisions = 3"):
        AllocatorSettings(roundup_power2_divisions=3)
    with pytest.raises(ValueError, match="large_segment_bytes = 3145728"):
        AllocatorSettings(large_segment_bytes=3 * MIB)


def test_the_least_capacity_is_what_remains_after_giving_back_all_that_is_free() -> None:
    events = [malloc(0, 30 * MIB), free(0), malloc(1, 40 * MIB), free(1), malloc(2, 50 * MIB)]
    assert least_capacity(events) == LeastCapacity(least=50 * MIB, comfortable=120 * MIB, flushes=2)
    assert least_capacity([]) == LeastCapacity(least=0, comfortable=0, flushes=0)
