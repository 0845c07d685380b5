import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.schedule import check, generate, in_flight
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
