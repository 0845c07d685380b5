import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.schedule import check, generate
from tests.schedule.in_flight import held_counts, in_flight, waiting
from tests.schedule.text import lines, show


def test_1f1b_of_three_stages_and_four_microbatches():
    assert show(generate(3, 4, "1f1b")) == lines(
        """
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
        """
    )


def test_1f1b_with_fewer_microbatches_than_stages():
    assert show(generate(3, 1)) == lines(
        """
        0F0 0B0
        1F0 1B0
        2F0 2B0
        """
    )


def test_gpipe():
    assert show(generate(2, 3, "gpipe")) == lines(
        """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
        """
    )


def test_interleaved_1f1b_of_two_groups_with_two_chunks():
    assert show(generate(4, 4, "interleaved-1f1b", num_groups=2)) == lines(
        """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        """
    )


def test_zero_bubble_of_three_stages_and_four_microbatches():
    assert show(generate(3, 4, "zb-h1")) == lines(
        """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """
    )


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_1f1b_is_complete_ends_and_holds_what_it_promises(num_groups, chunks, rounds):
    num_microbatches = rounds * num_groups
    schedule = generate(num_groups * chunks, num_microbatches, "interleaved-1f1b", num_groups=num_groups)
    check(schedule, num_microbatches)
    for group, actions in enumerate(schedule):
        total = num_microbatches * chunks
        warm_up = min(2 * (num_groups - group - 1) + (chunks - 1) * num_groups, total)
        assert len(actions) == 2 * total
        assert in_flight(schedule, group) == min(warm_up + 1, total)
        assert waiting(schedule, group) == 0


def test_one_chunk_each_is_1f1b_with_a_longer_warm_up():
    assert show(generate(3, 3, "interleaved-1f1b", num_groups=3)) == lines(
        """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
        2F0 2B0 2F1 2B1 2F2 2B2
        """
    )


@given(st.integers(1, 9), st.integers(1, 12))
def test_zero_bubble_is_complete_ends_and_holds_no_more_than_1f1b(num_stages, num_microbatches):
    schedule = generate(num_stages, num_microbatches, "zb-h1")
    check(schedule, num_microbatches)
    for stage, actions in enumerate(schedule):
        assert len(actions) == 3 * num_microbatches
        assert in_flight(schedule, stage) == min(num_stages - stage, num_microbatches)
        assert waiting(schedule, stage) <= min(stage + 1, num_microbatches)
        for held in held_counts(actions):
            both = sum(count for _, count in held.open) + sum(count for _, count in held.waiting)
            assert both <= min(num_stages, num_microbatches)


@given(st.integers(1, 9), st.integers(1, 12))
def test_in_flight_is_what_each_schedule_promises(num_stages, num_microbatches):
    pipelined, flush = (generate(num_stages, num_microbatches, name) for name in ("1f1b", "gpipe"))
    for stage in range(num_stages):
        assert in_flight(pipelined, stage) == min(num_stages - stage, num_microbatches)
        assert in_flight(flush, stage) == num_microbatches
    check(pipelined, num_microbatches)
    check(flush, num_microbatches)


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (-1, 1)])
def test_counts_below_one_are_refused(counts):
    with pytest.raises(ValueError, match=f"num_stages = {counts[0]}, num_microbatches = {counts[1]}: both must be"):
        generate(*counts)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="schedule 'zigzag': known schedules are 1f1b, gpipe, interleaved-1f1b, zb-h1"):
        generate(2, 2, "zigzag")


@pytest.mark.parametrize(("groups", "microbatches"), [(3, 6), (2, 3), (0, 4)])
def test_interleaving_needs_multiples_of_the_groups(groups, microbatches):
    with pytest.raises(ValueError, match=f"num_groups = {groups}, num_stages = 4, num_microbatches = {microbatches}"):
        generate(4, microbatches, "interleaved-1f1b", num_groups=groups)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_only_interleaving_gives_a_group_several_stages(name):
    with pytest.raises(ValueError, match=f"{name} with num_groups = 2, num_stages = 4: only interleaved-1f1b"):
        generate(4, 4, name, num_groups=2)
