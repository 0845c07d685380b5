import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.orders import generate
from lightning_mist.schedule.stage_program import StageUnits, lines_of, update_rows
from lightning_mist.schedule.unit_checks import check_deferred, check_units, check_update
from tests.schedule.test_stage_program import UNITS, actions, flat
from tests.schedule.text import parse

EVERYTHING = StageUnits(order=(0, 1, 2), reduced=frozenset((0, 1, 2)), sharded=frozenset((0, 1, 2)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0:0", "0F0:0: this computes with parameters that are sharded"),
        ("0UNSHARD:0 0UNSHARD:0", "0UNSHARD:0: this unit is unsharded already"),
        ("0UNSHARD:0 0UNSHARD:1 0UNSHARD:2", "0UNSHARD:2: this makes 3 unsharded units"),
        ("0RESHARD:0", "0RESHARD:0: this unit is not unsharded"),
        ("0UNSHARD:0 0F0:0", "0RESHARD:0 is missing at the end"),
        ("0UNSHARD:0 0B0:0 0RESHARD:0", "0REDUCE:0 is missing at the end"),
        ("0REDUCE:0", "0REDUCE:0: no backward of this unit has run"),
    ],
)
def test_broken_lists_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        check_units(parse(text), {0: EVERYTHING})


@given(st.data())
def test_a_list_without_one_of_its_actions_is_refused(data):
    moved = data.draw(st.sets(st.sampled_from(UNITS), min_size=1))
    kinds = {"O": moved, "P": UNITS[1:3]}
    whole = flat(update_rows(UNITS, kinds))
    gone = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ScheduleError):
        check_update(whole[:gone] + whole[gone + 1 :], UNITS, kinds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0LOAD_O:0 0LOAD_O:1 0LOAD_O:head", "0LOAD_O:head: there are 2 buffers, and none is free: ... 0LOAD_O:0"),
        ("0LOAD_O:0 0LOAD_O:0", "0LOAD_O:0: this was fetched already"),
        ("0UPDATE:0", "0UPDATE:0: what this needs is in host memory"),
        ("0UPDATE:tail 0UPDATE:tail", "0UPDATE:tail: this unit was updated already"),
        ("0LOAD_O:0 0STORE_O:0", "0STORE_O:0: there is nothing new to write back"),
        ("0LOAD_O:0 0UPDATE:0", "0STORE_O:0 is missing at the end"),
        ("0LOAD_O:0 0UPDATE:0 0STORE_O:0", "0UPDATE:1 is missing at the end"),
    ],
)
def test_broken_rules_are_named(text, message):
    every = [(0, 0), (0, 1), (0, HEAD)]
    with pytest.raises(ScheduleError, match=message):
        check_update(actions(text), every, {"O": every})


schedules = st.tuples(
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3)
)


def expanded(schedule, stages, microbatches, layers, stage):
    order = (*[HEAD] * (stage == 0), *range(layers + 1), *[TAIL] * (stage == stages - 1))
    units = StageUnits(order=order, activations=frozenset(range(layers + 1)))
    list_of_stage = generate(stages, microbatches, schedule)[stage]
    return lines_of(list_of_stage, {stage: units}), {stage: units}


@given(schedules, st.integers(0, 2), st.data())
def test_a_schedule_without_one_of_its_moves_is_refused(drawn, stage, data):
    schedule, stages, *sizes = drawn
    lines, units = expanded(schedule, stages, *sizes, stage % stages)
    whole = flat(lines)
    moves = [index for index, action in enumerate(whole) if action.kind.value.endswith("_A")]
    gone = data.draw(st.sampled_from(moves))
    with pytest.raises(ScheduleError, match="what "):
        check_units([whole[:gone] + whole[gone + 1 :]], units)


def test_a_unit_that_is_used_before_its_update_is_refused():
    with pytest.raises(ScheduleError, match="0UPDATE:1: this unit was used before it was updated"):
        check_deferred(actions("0UPDATE:0 0F0:0 0F0:1 0UPDATE:1"))
