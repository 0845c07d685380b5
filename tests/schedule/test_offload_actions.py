"""Strings in, strings out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.offload_actions import (
    check_deferred,
    check_update,
    offloaded_names,
    update_actions,
    with_activations,
)
from lightning_mist.schedule.orders import generate
from lightning_mist.schedule.shard_units import StageUnits, check_units, expand

UNITS = [(0, HEAD), (0, 0), (0, 1), (0, TAIL)]


def actions(text):
    return tuple(Action.parse(word) for word in text.split())


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        ((), "0UPDATE:head 0UPDATE:0 0UPDATE:1 0UPDATE:tail"),
        (
            UNITS,
            "0LOAD_O:head 0LOAD_O:0 0UPDATE:head 0STORE_O:head 0LOAD_O:1 0UPDATE:0 0STORE_O:0 "
            "0LOAD_O:tail 0UPDATE:1 0STORE_O:1 0UPDATE:tail 0STORE_O:tail",
        ),
        (
            UNITS[1:3],
            "0LOAD_O:0 0UPDATE:head 0LOAD_O:1 0UPDATE:0 0STORE_O:0 0UPDATE:1 0STORE_O:1 0UPDATE:tail",
        ),
    ],
)
def test_state_is_fetched_one_unit_ahead(moved, text):
    assert update_actions(UNITS, {"O": moved}) == actions(text)


def test_parameters_are_fetched_with_state():
    text = (
        "0LOAD_O:0 0LOAD_P:0 0UPDATE:head 0LOAD_P:1 0UPDATE:0 0STORE_O:0 0STORE_P:0 0UPDATE:1 0STORE_P:1 0UPDATE:tail"
    )
    assert update_actions(UNITS, {"O": [(0, 0)], "P": [(0, 0), (0, 1)]}) == actions(text)


keys = st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 9)), unique=True, max_size=9)


@given(keys.flatmap(lambda units: st.tuples(st.just(units), st.sets(st.sampled_from(units)) if units else st.just([]))))
def test_every_list_passes_the_check(drawn):
    units, moved = drawn
    kinds = {"O": moved, "P": units[::2]}
    check_update(update_actions(units, kinds), units, kinds)


@given(st.data())
def test_a_list_without_one_of_its_actions_is_refused(data):
    moved = data.draw(st.sets(st.sampled_from(UNITS), min_size=1))
    kinds = {"O": moved, "P": UNITS[1:3]}
    whole = update_actions(UNITS, kinds)
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


def test_what_is_moved_is_chosen_unit_by_unit():
    units = [[("a", 8), ("b", 4)], [("c", 4)], [("d", 4), ("e", 4), ("f", 8)]]
    assert offloaded_names(units, 0.5) == {"b", "f"}
    assert offloaded_names(units, 1.0) == set("abcdef")


def test_actions_of_the_update_need_a_unit():
    with pytest.raises(ScheduleError, match="needs a unit"):
        Action(0, ActionKind.UPDATE)


ORDER = (HEAD, 0, 1, TAIL)


def moved(text, units=(0, 1), order=ORDER, trained=True):
    return " ".join(map(str, with_activations(actions(text), order, units, is_trained=trained)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "0F2:head 0F2:0 0F2:1 0F2:tail",
            "0F2:head 0F2:0 0STORE_A2:0 0F2:1 0STORE_A2:1 0DROP_A2:0 0F2:tail 0DROP_A2:1",
        ),
        (
            "0B2:tail 0REDUCE:tail 0B2:1 0REDUCE:1 0B2:0 0REDUCE:0 0B2:head 0REDUCE:head",
            "0LOAD_A2:1 0B2:tail 0REDUCE:tail 0LOAD_A2:0 0B2:1 0REDUCE:1 0B2:0 0REDUCE:0 0B2:head 0REDUCE:head",
        ),
        ("0W2 0REDUCE:1", "0W2 0REDUCE:1"),
    ],
)
def test_activations_leave_behind_their_unit_and_arrive_one_unit_ahead(text, found):
    assert moved(text) == found


def test_a_stage_waits_for_what_its_last_layer_moves():
    assert moved("1F0:2 1F0:3", (2, 3), (2, 3)) == "1F0:2 1STORE_A0:2 1F0:3 1STORE_A0:3 1DROP_A0:2 1DROP_A0:3"
    assert moved("1B0:3 1B0:2", (2, 3), (2, 3)) == "1LOAD_A0:3 1LOAD_A0:2 1B0:3 1B0:2"


def test_what_is_only_evaluated_keeps_nothing():
    text = "0F0:head 0F0:0 0F0:1 0F0:tail"
    assert moved(text, trained=False) == moved(text, ()) == text


schedules = st.tuples(
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3)
)


def expanded(schedule, stages, microbatches, layers, stage):
    order = (*[HEAD] * (stage == 0), *range(layers + 1), *[TAIL] * (stage == stages - 1))
    units = StageUnits(order=order, activations=frozenset(range(layers + 1)))
    list_of_stage = generate(stages, microbatches, schedule)[stage]
    return expand(list_of_stage, {stage: units}), {stage: units}


@given(schedules, st.integers(0, 2))
def test_every_schedule_passes_the_check(drawn, stage):
    schedule, stages, *sizes = drawn
    lines, units = expanded(schedule, stages, *sizes, stage % stages)
    check_units(lines, units)


@given(schedules, st.integers(0, 2), st.data())
def test_a_schedule_without_one_of_its_moves_is_refused(drawn, stage, data):
    schedule, stages, *sizes = drawn
    lines, units = expanded(schedule, stages, *sizes, stage % stages)
    flat = [action for line in lines for action in line]
    moves = [index for index, action in enumerate(flat) if action.kind.value.endswith("_A")]
    gone = data.draw(st.sampled_from(moves))
    with pytest.raises(ScheduleError, match="what "):
        check_units([flat[:gone] + flat[gone + 1 :]], units)


def test_a_deferred_step_updates_each_unit_beside_the_one_before():
    update = update_actions(UNITS, {"O": UNITS[1:], "G": UNITS[2:3]}, gathers=True)
    lines = expand(actions("0F0 0B0 0F1 0B1"), {0: StageUnits(order=(HEAD, 0, 1, TAIL))}, update)
    assert lines[0] == actions(
        "0LOAD_O:0 0UPDATE:head 0GATHER:head 0LOAD_O:1 0LOAD_G:1 0UPDATE:0 0GATHER:0 0STORE_O:0 0F0:head "
        "0LOAD_O:tail 0UPDATE:1 0GATHER:1 0STORE_O:1 0F0:0 0UPDATE:tail 0GATHER:tail 0STORE_O:tail 0F0:1 0F0:tail"
    )
    assert lines[1:] == tuple(map(actions, ("0B0", "0F1", "0B1")))


def test_what_is_fetched_is_updated_before_it_is_given_out():
    update = update_actions(UNITS[:3], {"P": UNITS[:3]})
    lines = expand(actions("0F0 0B0"), {0: StageUnits(order=(HEAD, 0, 1), sharded=frozenset((HEAD, 0, 1)))}, update)
    assert lines[0] == actions(
        "0LOAD_P:head 0LOAD_P:0 0UPDATE:head 0STORE_P:head 0UNSHARD:head 0LOAD_P:1 0UPDATE:0 0STORE_P:0 0UNSHARD:0 "
        "0F0:head 0RESHARD:head 0UPDATE:1 0STORE_P:1 0UNSHARD:1 0F0:0 0F0:1"
    )


@given(st.data())
def test_a_deferred_step_is_the_whole_step_and_comes_before_it_is_used(data):
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"]))
    chunks = 2 if name == "interleaved-1f1b" else 1
    group = data.draw(st.integers(0, 1))
    listed = generate(2 * chunks, data.draw(st.sampled_from([2, 4])), name, num_groups=2)[group]
    units, update = {}, []
    for stage in range(group, 2 * chunks, 2):
        order = (*[HEAD] * (stage == 0), *range(3 * stage, 3 * stage + 3), *[TAIL] * (stage == 2 * chunks - 1))
        chosen = st.sets(st.sampled_from(order))
        units[stage] = StageUnits(order=order, sharded=frozenset(data.draw(chosen)), activations=frozenset())
        updated = data.draw(chosen)
        update += [(stage, unit) for unit in order if unit in updated]
    kinds = {kind: data.draw(st.sets(st.sampled_from(update))) if update else set() for kind in "OPG"}
    flat = [line for part in expand(listed, units, update_actions(update, kinds)) for line in part]
    check_units([flat], units)
    check_update([line for line in flat if line in set(update_actions(update, kinds))], update, kinds)


def test_a_unit_that_is_used_before_its_update_is_refused():
    with pytest.raises(ScheduleError, match="0UPDATE:1: this unit was used before it was updated"):
        check_deferred(actions("0UPDATE:0 0F0:0 0F0:1 0UPDATE:1"))
