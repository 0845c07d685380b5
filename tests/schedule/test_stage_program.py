"""Strings in, strings out; and lists of any stages against the checks, which know nothing of tables."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.plan import ZeroStage
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import COMPUTATIONS, HEAD, TAIL
from lightning_mist.schedule.orders import generate
from lightning_mist.schedule.stage_program import StageUnits, lines_of, update_rows
from lightning_mist.schedule.unit_checks import check_units, check_update

ACTIVATIONS = (ActionKind.STORE_ACTIVATIONS, ActionKind.DROP_ACTIVATIONS, ActionKind.LOAD_ACTIVATIONS)


def actions(text):
    return tuple(Action.parse(word) for word in text.split())


def flat(lines):
    return tuple(chain.from_iterable(lines))


def units(*order, zero=3, reduced=None):
    reduced = frozenset(order if reduced is None else reduced)
    return StageUnits(order=order, reduced=reduced, sharded=frozenset(order if zero == ZeroStage.PARAMETERS else ()))


def show(lines):
    return [" ".join(str(action) for action in line) for line in lines]


def test_gradients_leave_behind_the_weights_where_backwards_are_split():
    listed = actions("0F0 0I0 0F1 0I1 0W0 0W1 0REDUCE 0STEP")
    gradients = {0: units(0, 1, zero=ZeroStage.GRADIENTS)}
    lines = lines_of(listed, gradients)
    assert show(lines[:2]) == ["0F0:0 0F0:1", "0I0:1 0I0:0"]
    assert show(lines[4:6]) == ["0W0 0REDUCE:1 0REDUCE:0", "0W1 0REDUCE:1 0REDUCE:0"]
    check_units(lines, gradients)
    values = {0: units(0, 1, 2)}
    lines = lines_of(listed, values)
    assert show(lines[3:6]) == [
        "0I1:2 0RESHARD:2 0UNSHARD:0 0I1:1 0RESHARD:1 0I1:0 0RESHARD:0",
        "0W0 0REDUCE:2 0REDUCE:1 0REDUCE:0",
        "0W1 0REDUCE:2 0REDUCE:1 0REDUCE:0",
    ]
    check_units(lines, values)


def test_a_unit_comes_while_the_one_before_computes():
    listed = actions("0F0 0B0 0REDUCE 0STEP")
    lines = lines_of(listed, {0: units(HEAD, 0, 1, TAIL)})
    assert show(lines) == [
        "0UNSHARD:head 0UNSHARD:0 0F0:head 0RESHARD:head 0UNSHARD:1 0F0:0 0RESHARD:0 0UNSHARD:tail 0F0:1 0F0:tail",
        "0B0:tail 0REDUCE:tail 0RESHARD:tail 0UNSHARD:0 0B0:1 0REDUCE:1 0RESHARD:1 0UNSHARD:head 0B0:0 0REDUCE:0 "
        "0RESHARD:0 0B0:head 0REDUCE:head 0RESHARD:head",
        "0REDUCE",
        "0STEP",
    ]
    check_units(lines, {0: units(HEAD, 0, 1, TAIL)})


def test_the_next_action_begins_with_its_units_there():
    listed = actions("0F0 0F1 0B0 0B1")
    lines = lines_of(listed, {0: units(0, 1, 2)})
    assert (
        show(lines)[0]
        == "0UNSHARD:0 0UNSHARD:1 0F0:0 0RESHARD:0 0UNSHARD:2 0F0:1 0RESHARD:1 0UNSHARD:0 0F0:2 0RESHARD:2 0UNSHARD:1"
    )
    assert show(lines)[1] == "0F1:0 0RESHARD:0 0UNSHARD:2 0F1:1 0F1:2"


def test_gradients_alone():
    listed = actions("0F0 0B0 0REDUCE")
    lines = lines_of(listed, {0: units(0, 1, zero=2, reduced=[1])})
    assert show(lines) == ["0F0:0 0F0:1", "0B0:1 0REDUCE:1 0B0:0", "0REDUCE"]
    check_units(lines, {0: units(0, 1, zero=2, reduced=[1])})


def test_where_backward_is_split_gradients_are_reduced_behind_the_weights():
    listed = actions("0F0 0I0 0F1 0W0 0I1 0W1 0REDUCE")
    lines = lines_of(listed, {0: units(0, 1)})
    assert show(lines) == [
        "0UNSHARD:0 0UNSHARD:1 0F0:0 0F0:1",
        "0I0:1 0I0:0",
        "0F1:0 0F1:1",
        "0W0 0REDUCE:1 0REDUCE:0",
        "0I1:1 0RESHARD:1 0I1:0 0RESHARD:0",
        "0W1 0REDUCE:1 0REDUCE:0",
        "0REDUCE",
    ]
    check_units(lines, {0: units(0, 1)})


def test_other_stages_stay_as_they_are():
    listed = actions("0F0 2F0 2B0 0B0")
    lines = lines_of(listed, {2: units(4)})
    assert show(lines) == ["0F0", "2UNSHARD:4 2F0:4", "2B0:4 2REDUCE:4 2RESHARD:4", "0B0"]


def test_evaluation_only():
    listed = actions("0F0 0F1")
    lines = lines_of(listed, {0: units(0, 1)})
    assert show(lines) == ["0UNSHARD:0 0UNSHARD:1 0F0:0 0F0:1", "0F1:0 0RESHARD:0 0F1:1 0RESHARD:1"]


def moved(text, order=(HEAD, 0, 1, TAIL), kept=(0, 1)):
    units = {0: StageUnits(order=order, activations=frozenset(kept))}
    return show(lines_of(actions(text), units))


def test_activations_leave_behind_their_unit_and_arrive_one_unit_ahead():
    assert moved("0F2 0B2") == [
        "0F2:head 0F2:0 0STORE_A2:0 0F2:1 0STORE_A2:1 0DROP_A2:0 0F2:tail 0DROP_A2:1",
        "0LOAD_A2:1 0B2:tail 0LOAD_A2:0 0B2:1 0B2:0 0B2:head",
    ]


def test_a_stage_waits_for_what_its_last_layer_moves():
    assert moved("0F0 0I0 0W0", (2, 3), (2, 3)) == [
        "0F0:2 0STORE_A0:2 0F0:3 0STORE_A0:3 0DROP_A0:2 0DROP_A0:3",
        "0LOAD_A0:3 0LOAD_A0:2 0I0:3 0I0:2",
        "0W0",
    ]


def test_what_is_only_evaluated_keeps_nothing():
    assert moved("0F0") == ["0F0:head 0F0:0 0F0:1 0F0:tail"]


FIRST, REDUCED = "0B0:1 0STORE_G:1 0B0:0 0STORE_G:0", "0W0 0REDUCE:1 0REDUCE:0 0STORE_G:1 0STORE_G:0"


@pytest.mark.parametrize(
    ("text", "how", "found"),
    [
        ("0B0 0B1", "alone", [FIRST, "0LOAD_G:1 0B1:1 0STORE_G:1 0LOAD_G:0 0B1:0 0STORE_G:0"]),
        ("0B0 0B1", "averaged", [FIRST, "0LOAD_G:1 0B1:1 0REDUCE:1 0LOAD_G:0 0B1:0 0REDUCE:0 0STORE_G:1 0STORE_G:0"]),
        ("0B0", "reduced", ["0B0:1 0REDUCE:1 0B0:0 0REDUCE:0 0STORE_G:1 0STORE_G:0"]),
        ("0I0 0W0", "alone", ["0I0:1 0I0:0", "0W0 0STORE_G:1 0STORE_G:0"]),
        ("0W0 0W1", "reduced", [REDUCED, "0W1 0LOAD_G:1 0REDUCE:1 0LOAD_G:0 0REDUCE:0 0STORE_G:1 0STORE_G:0"]),
    ],
)
def test_gradients_in_host_memory_come_and_go(text, how, found):
    every = frozenset((0, 1))
    reduced = every if how == "reduced" else frozenset()
    of_stage = StageUnits(order=(0, 1), reduced=reduced, gradients=every, is_averaged=how == "averaged")
    assert show(lines_of(actions(text), {0: of_stage})) == found


UNITS = [(0, HEAD), (0, 0), (0, 1), (0, TAIL)]


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
    assert flat(update_rows(UNITS, {"O": moved})) == actions(text)


def test_parameters_are_fetched_with_state():
    text = (
        "0LOAD_O:0 0LOAD_P:0 0UPDATE:head 0LOAD_P:1 0UPDATE:0 0STORE_O:0 0STORE_P:0 0UPDATE:1 0STORE_P:1 0UPDATE:tail"
    )
    assert flat(update_rows(UNITS, {"O": [(0, 0)], "P": [(0, 0), (0, 1)]})) == actions(text)


def test_a_deferred_step_updates_each_unit_beside_the_one_before():
    update = update_rows(UNITS, {"O": UNITS[1:], "G": UNITS[2:3]}, gathers=True)
    lines = lines_of(actions("0F0 0B0 0F1 0B1"), {0: StageUnits(order=(HEAD, 0, 1, TAIL))}, update)
    assert lines[0] == actions(
        "0LOAD_O:0 0UPDATE:head 0GATHER:head 0LOAD_O:1 0LOAD_G:1 0UPDATE:0 0GATHER:0 0STORE_O:0 0F0:head "
        "0LOAD_O:tail 0UPDATE:1 0GATHER:1 0STORE_O:1 0F0:0 0UPDATE:tail 0GATHER:tail 0STORE_O:tail 0F0:1 0F0:tail"
    )
    assert lines[1:] == tuple(map(actions, ("0B0", "0F1", "0B1")))


def test_what_is_fetched_is_updated_before_it_is_given_out():
    update = update_rows(UNITS[:3], {"P": UNITS[:3]})
    lines = lines_of(actions("0F0 0B0"), {0: StageUnits(order=(HEAD, 0, 1), sharded=frozenset((HEAD, 0, 1)))}, update)
    assert lines[0] == actions(
        "0LOAD_P:head 0LOAD_P:0 0UPDATE:head 0STORE_P:head 0UNSHARD:head 0LOAD_P:1 0UPDATE:0 0STORE_P:0 0UNSHARD:0 "
        "0F0:head 0RESHARD:head 0UPDATE:1 0STORE_P:1 0UNSHARD:1 0F0:0 0F0:1"
    )


@st.composite
def stage(draw, index, count, first):
    """Units of one stage of a pipeline, of which anything is so that can be."""
    order = (*[HEAD] * (index == 0), *range(first, first + draw(st.integers(1, 4))), *[TAIL] * (index == count - 1))
    some = st.frozensets(st.sampled_from(order))
    reduced, gradients = draw(st.just(frozenset()) | some), draw(some)
    return StageUnits(
        order=order,
        reduced=reduced,
        sharded=draw(some),
        activations=draw(some),
        # Where ranks share out gradients it is these that may be offloaded.
        gradients=gradients & reduced if reduced else gradients,
        is_averaged=draw(st.booleans()) and not reduced,
    )


@given(st.data())
def test_lists_do_everything_once_and_keep_the_rules(data):
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"]))
    is_chunked = name == "interleaved-1f1b"
    chunks, groups = 2 if is_chunked else 1, 2 if is_chunked else data.draw(st.integers(1, 3))
    microbatches = data.draw(st.sampled_from([2, 4]) if is_chunked else st.integers(1, 5))
    group = data.draw(st.integers(0, groups - 1))
    listed = generate(groups * chunks, microbatches, name, num_groups=groups)[group]
    stages = range(group, groups * chunks, groups)
    units = {at: data.draw(stage(at, groups * chunks, 5 * at)) for at in stages}
    updated = [(at, unit) for at in stages for unit in units[at].order if data.draw(st.booleans())]
    kinds = {kind: data.draw(st.sets(st.sampled_from(updated))) if updated else set() for kind in "OPG"}
    update = update_rows(updated, kinds, gathers=data.draw(st.booleans()))
    check_update(flat(update), updated, kinds)
    lines = lines_of(listed, units, update)
    check_units(lines, units)
    found = Counter(flat(lines))
    forwards = flat(part for action, part in zip(listed, lines, strict=True) if action.kind is ActionKind.FORWARD)
    assert tuple(action for action in forwards if action in set(flat(update))) == flat(update)
    split = ActionKind.BACKWARD_INPUT if name == "zb-h1" else ActionKind.BACKWARD
    for at, of_stage in units.items():
        if of_stage.is_expanded:
            for kind, having in (
                *((kind, of_stage.order) for kind in (ActionKind.FORWARD, split)),
                *((kind, of_stage.activations) for kind in ACTIVATIONS),
            ):
                assert all(
                    found[Action(at, kind, index, unit)] == 1 for index in range(microbatches) for unit in having
                )
            of_gradients = [Action(at, ActionKind.STORE_GRADIENTS, None, unit) for unit in of_stage.gradients]
            of_gradients += [Action(at, ActionKind.REDUCE_GRADIENTS, None, unit) for unit in of_stage.reduced]
            assert all(found[action] == microbatches for action in of_gradients)
    computed = [(a.stage, a.kind, a.microbatch) for a in flat(lines) if a.kind in COMPUTATIONS]
    assert list(dict.fromkeys(computed)) == [(action.stage, action.kind, action.microbatch) for action in listed]
