"""The caching allocator: traces worked by hand from the algorithm, and properties of any trace."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings, MemoryEvent, free, malloc
from lightning_mist.estimate.allocator.device_allocator import least_capacity, simulate_allocator
from tests.cost.allocator_traces import KIB, MIB, reserved, traces
from tests.tiers import examples

PEAKS = ("peak_requested", "peak_allocated", "peak_reserved")


def test_requests_are_rounded_to_512_bytes() -> None:
    result = simulate_allocator([malloc(0, 1), malloc(1, 513)])
    assert (result.peak_requested, result.peak_allocated) == (514, 512 + 1024)


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
    assert result.peak_reserved == 62 * MIB
    assert result.peak_allocated == 30 * MIB


def test_at_capacity_free_segments_are_given_back() -> None:
    events = [malloc(0, 30 * MIB), free(0), malloc(1, 40 * MIB)]
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=64 * MIB))
    assert (result.peak_reserved, result.flushes, result.out_of_memory) == (40 * MIB, 1, None)
    assert reserved(*events, capacity_bytes=70 * MIB) == 70 * MIB


def test_a_segment_with_a_living_block_is_not_given_back() -> None:
    # 2 MiB of the segment of 20 MiB live: it stays, and 64 MiB have no room for 50 MiB more.
    events = [malloc(0, 2 * MIB), malloc(1, 9 * MIB), free(1), malloc(2, 50 * MIB)]
    result = simulate_allocator(events, AllocatorSettings(capacity_bytes=64 * MIB))
    assert (result.out_of_memory, result.reserved) == (3, 20 * MIB)
    assert result.allocated == 2 * MIB
    assert result.flushes == 1


def test_empty_tensors_take_no_memory() -> None:
    result = simulate_allocator([malloc(0, 0), free(0)])
    assert result.peak_reserved == 0
    assert result.allocated == 0


def test_the_least_capacity_is_what_remains_after_giving_back_all_that_is_free() -> None:
    events = [malloc(0, 30 * MIB), free(0), malloc(1, 40 * MIB), free(1), malloc(2, 50 * MIB)]
    assert least_capacity(events) == 50 * MIB
    assert simulate_allocator(events, AllocatorSettings(capacity_bytes=50 * MIB)).flushes == 2
    assert least_capacity([]) == 0


@settings(max_examples=examples(40))
@given(traces(), st.booleans())
def test_the_least_capacity_runs_and_a_step_less_does_not(trace: list[MemoryEvent], expandable: bool) -> None:
    setup = AllocatorSettings(expandable_segments=expandable)
    least, unlimited = least_capacity(trace, setup), simulate_allocator(trace, setup)
    assert simulate_allocator(trace, replace(setup, capacity_bytes=least)).out_of_memory is None
    if least > 2 * MIB:
        less = simulate_allocator(trace, replace(setup, capacity_bytes=least - 2 * MIB))
        assert less.out_of_memory is not None
    enough = simulate_allocator(trace, replace(setup, capacity_bytes=unlimited.peak_reserved))
    assert enough.flushes == 0
    assert all(getattr(enough, name) == getattr(unlimited, name) for name in PEAKS)
    assert least <= unlimited.peak_reserved
    if unlimited.peak_reserved > 2 * MIB:
        tight = simulate_allocator(trace, replace(setup, capacity_bytes=unlimited.peak_reserved - 1))
        assert tight.flushes > 0
