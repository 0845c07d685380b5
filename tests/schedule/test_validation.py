import pytest

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule import Action, check, generate
from lightning_mist.schedule.lowering import add_transfers
from lightning_mist.schedule.validation import format_grid
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


def test_lists_of_groups_with_several_stages():
    check(parse("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"), 2)
    with pytest.raises(ScheduleError, match="2F0 is in the list of stage 1: move it to its own stage"):
        check(parse("0F0 0B0\n1F0 2F0 2B0 1B0 3F0 3B0"), 1)
    with pytest.raises(ScheduleError, match=r"3B0 is missing(.|\n)*group 0: "):
        check(parse("0F0 2F0 2B0 0B0\n1F0 3F0 1B0"), 1)
    with pytest.raises(ScheduleError, match="2REDUCE is in the list of stage 0"):
        check(parse("0F0 2F0 2B0 0B0 2REDUCE\n1F0 3F0 3B0 1B0"), 1)


def test_groups_receive_in_the_order_of_sending_over_whatever_boundary():
    good = add_transfers(generate(4, 4, "interleaved-1f1b", num_groups=2))
    check(good, 4)
    line = list(good[0])
    first, second = (line.index(Action.parse(text)) for text in ("2RECV_F2", "0RECV_B0"))
    line[first], line[second] = line[second], line[first]
    with pytest.raises(ScheduleError, match="0RECV_B0 receives what 1SEND_F2 sends"):
        check((tuple(line), good[1]), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0W0 0I0", "0W0 comes before 0I0: it must come after it"),
        ("0F0 0I0", "0W0 is missing: stage 0 needs it once per batch"),
        ("0F0 0W0", "0I0 is missing"),
        ("0F0 0I0 0B0 0W0", "0B0: stage 0 splits its backwards into I and W; remove it"),
    ],
)
def test_split_backwards(text, message):
    with pytest.raises(ScheduleError, match=message):
        check(parse(text), 1)


def test_a_stage_may_split_its_backwards_and_its_neighbour_not():
    check(parse("0F0 0B0\n1F0 1I0 1W0"), 1)
    check(add_transfers(parse("0F0 0I0 0W0\n1F0 1B0")), 1)
    with pytest.raises(ScheduleError, match="0I0 waits for 1B0 for ever"):
        check(parse("0F0 0I0 0W0 0F1 0I1 0W1\n1F0 1F1 1B0 1B1"), 2)
