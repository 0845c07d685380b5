"""Strings in, strings out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.moves import check_update, moved_names, update_actions

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
    assert update_actions(UNITS, moved) == actions(text)


keys = st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 9)), unique=True, max_size=9)


@given(keys.flatmap(lambda units: st.tuples(st.just(units), st.sets(st.sampled_from(units)) if units else st.just([]))))
def test_every_list_passes_the_check(drawn):
    units, moved = drawn
    check_update(update_actions(units, moved), units, moved)


@given(st.data())
def test_a_list_without_one_of_its_actions_is_refused(data):
    moved = data.draw(st.sets(st.sampled_from(UNITS), min_size=1))
    whole = update_actions(UNITS, moved)
    gone = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ScheduleError):
        check_update(whole[:gone] + whole[gone + 1 :], UNITS, moved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0LOAD_O:0 0LOAD_O:1 0LOAD_O:head", "0LOAD_O:head: there are 2 rooms, and none is free: ... 0LOAD_O:0"),
        ("0LOAD_O:0 0LOAD_O:0", "0LOAD_O:0: this unit's state was fetched already"),
        ("0UPDATE:0", "0UPDATE:0: this unit's state is in host memory"),
        ("0UPDATE:tail 0UPDATE:tail", "0UPDATE:tail: this unit was updated already"),
        ("0LOAD_O:0 0STORE_O:0", "0STORE_O:0: there is nothing new to write back"),
        ("0LOAD_O:0 0UPDATE:0", "0STORE_O:0 is missing at the end"),
        ("0LOAD_O:0 0UPDATE:0 0STORE_O:0", "0UPDATE:1 is missing at the end"),
    ],
)
def test_broken_rules_are_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        check_update(actions(text), [(0, 0), (0, 1), (0, HEAD)], [(0, 0), (0, 1), (0, HEAD)])


def test_what_is_moved_is_chosen_unit_by_unit():
    units = [[("a", 8), ("b", 4)], [("c", 4)], [("d", 4), ("e", 4), ("f", 8)]]
    assert moved_names(units, 0.5) == {"b", "f"}
    assert moved_names(units, 1.0) == set("abcdef")


def test_actions_of_the_update_need_a_unit():
    with pytest.raises(ScheduleError, match="needs a unit"):
        Action(0, ActionKind.UPDATE)
