import pytest

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule import check, generate, in_flight
from lightning_mist.schedule.check import format_grid, in_flight_counts
from lightning_mist.schedule.lower import add_transfers, add_update
from tests.schedule.text import lines, parse

GOOD = """
0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1 0REDUCE 0REDUCE_TIED 0STEP 0GATHER
1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE 1REDUCE_TIED 1STEP 1GATHER
"""


def test_good_schedules_pass():
    check(parse(GOOD), 2)
    check(parse("0F0 0B0 0F1 0B1"), 2)
    check(parse("0F0 0F1 0B1 0B0\n1F1 1F0 1B1 1B0"), 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F1 ", "", "0F1 is missing: stage 0 needs it once per batch"),
        (" 0B1 ", " ", "0B1 is missing"),
        ("1B1 ", "1B1 1B1 ", "1B1 comes twice"),
        ("0F1 ", "1F1 ", "1F1 is in the list of stage 0"),
        ("0F1 0SEND_F1", "0F1 0SEND_F1 0F2", "0F2: there are 2 microbatches, numbered from 0"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 comes before 0F0"),
        ("0RECV_B0 0F1 0SEND_F1 0B0", "0F1 0SEND_F1 0B0 0RECV_B0", "0B0 comes before 0RECV_B0"),
        ("0F0 0SEND_F0 0RECV_B0", "0RECV_B0 0F0 0SEND_F0", "0RECV_B0 comes before 0F0"),
        ("1F0 1RECV_F1 1B0", "1B0 1RECV_F1 1F0", "1B0 comes before 1F0"),
        ("1F1 1B1 1SEND_B1", "1F1 1SEND_B1 1B1", "1SEND_B1 comes before 1B1"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "1F0 comes before 1RECV_F0"),
        ("1SEND_B0 ", "", "1SEND_B0 is missing"),
        ("0F0 ", "0RECV_F0 0F0 ", "0RECV_F0: stage 0 of 2 has no such neighbour"),
        ("1F1 ", "1F1 1SEND_F1 ", "1SEND_F1: stage 1 of 2 has no such neighbour"),
        ("0B1 0REDUCE", "0REDUCE 0B1", "0B1 comes after REDUCE: it must come before"),
        ("1B1 1SEND_B1 1REDUCE", "1B1 1REDUCE 1SEND_B1", "1SEND_B1 comes after REDUCE"),
        ("0STEP 0GATHER", "0GATHER 0STEP", "0STEP comes after GATHER"),
        (" 1REDUCE_TIED", "", "1REDUCE_TIED is missing: all stages have it or none has"),
        ("1SEND_B0 1F1 1B1 1SEND_B1", "1F1 1B1 1SEND_B1 1SEND_B0", "0RECV_B0 receives what 1SEND_B1 sends"),
    ],
)
def test_one_broken_rule_each(old, new, message):
    assert old in GOOD
    with pytest.raises(ScheduleError, match=message):
        check(parse(GOOD.replace(old, new, 1)), 2)


def test_deadlock_names_who_waits_for_whom():
    with pytest.raises(ScheduleError, match=r"0B0 waits for 1B0 for ever \(stage 1 waits at 1F1\)"):
        check(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), 2)


def test_deadlock_of_a_lowered_schedule():
    lowered = add_transfers(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    with pytest.raises(ScheduleError, match=r"0B0 waits for 1SEND_B0 for ever \(stage 1 waits at 1F1\)"):
        check(lowered, 2)


def test_error_points_at_the_action():
    with pytest.raises(ScheduleError) as error:
        check(parse("0F0 0F1 0B1 0F0 0B0\n1F0 1B0 1F1 1B1"), 2)
    assert str(error.value).splitlines()[1:] == [
        "stage 0: 0F0 0F1 0B1 0F0 0B0",
        "                     ^^^",
        "stage 1: 1F0 1B0 1F1 1B1",
    ]


def test_error_points_behind_the_end_for_what_is_missing():
    with pytest.raises(ScheduleError) as error:
        check(parse("0F0 0B0 0F1"), 2)
    assert str(error.value).splitlines()[1:] == ["stage 0: 0F0 0B0 0F1", "                     ^"]


def test_no_stages():
    with pytest.raises(ScheduleError, match="a schedule without stages"):
        check((), 1)


def test_grid_aligns_columns():
    assert (
        format_grid(parse("0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0"), (1, 1))
        == lines(
            """
        stage 0: 0F0      0SEND_F0 0B0
        stage 1: 1RECV_F0 1F0      1B0
        """
        )
        + "\n"
        + " " * 18
        + "^^^"
    )


def test_in_flight_counts_over_a_list():
    lowered = add_update(add_transfers(generate(3, 4)), tied=False, gathers=[False] * 3)
    assert in_flight_counts(lowered[0]) == (1, 2, 3, 3, 3, 3, 2, 1)
    assert in_flight_counts(lowered[2]) == (1, 1, 1, 1, 1, 1, 1, 1)
    assert [in_flight(lowered, stage) for stage in range(3)] == [3, 2, 1]
