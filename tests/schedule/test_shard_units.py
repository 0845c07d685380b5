from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ScheduleError
from lightning_mist.plan import ModuleMap, ParameterUse, ZeroStage
from lightning_mist.plan.module_map import Exclusion
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import HEAD, INPUT_BACKWARDS, TAIL
from lightning_mist.schedule.orders import generate
from lightning_mist.schedule.shard_units import StageUnits, check_units, expand
from lightning_mist.schedule.stage_units import ShardUnit, shard_units


def units(*order, zero=3, reduced=None):
    reduced = frozenset(order if reduced is None else reduced)
    return StageUnits(order=order, reduced=reduced, sharded=frozenset(order if zero == ZeroStage.PARAMETERS else ()))


def parse(text):
    return [tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines()]


def show(lines):
    return [" ".join(str(action) for action in line) for line in lines]


def test_gradients_leave_behind_the_weights_where_backwards_are_split():
    (actions,) = parse("0F0 0I0 0F1 0I1 0W0 0W1 0REDUCE 0STEP")
    gradients = {0: units(0, 1, zero=ZeroStage.GRADIENTS)}
    lines = expand(actions, gradients)
    assert show(lines[:2]) == ["0F0:0 0F0:1", "0I0:1 0I0:0"]
    assert show(lines[4:6]) == ["0W0 0REDUCE:1 0REDUCE:0", "0W1 0REDUCE:1 0REDUCE:0"]
    check_units(lines, gradients)
    values = {0: units(0, 1, 2)}
    lines = expand(actions, values)
    assert show(lines[3:6]) == [
        "0I1:2 0RESHARD:2 0UNSHARD:0 0I1:1 0RESHARD:1 0I1:0 0RESHARD:0",
        "0W0 0REDUCE:2 0REDUCE:1 0REDUCE:0",
        "0W1 0REDUCE:2 0REDUCE:1 0REDUCE:0",
    ]
    check_units(lines, values)


def test_a_unit_comes_while_the_one_before_computes():
    (actions,) = parse("0F0 0B0 0REDUCE 0STEP")
    lines = expand(actions, {0: units(HEAD, 0, 1, TAIL)})
    assert show(lines) == [
        "0UNSHARD:head 0UNSHARD:0 0F0:head 0RESHARD:head 0UNSHARD:1 0F0:0 0RESHARD:0 0UNSHARD:tail 0F0:1 0F0:tail",
        "0B0:tail 0REDUCE:tail 0RESHARD:tail 0UNSHARD:0 0B0:1 0REDUCE:1 0RESHARD:1 0UNSHARD:head 0B0:0 0REDUCE:0 "
        "0RESHARD:0 0B0:head 0REDUCE:head 0RESHARD:head",
        "0REDUCE",
        "0STEP",
    ]
    check_units(lines, {0: units(HEAD, 0, 1, TAIL)})


def test_the_next_action_begins_with_its_units_there():
    (actions,) = parse("0F0 0F1 0B0 0B1")
    lines = expand(actions, {0: units(0, 1, 2)})
    assert (
        show(lines)[0]
        == "0UNSHARD:0 0UNSHARD:1 0F0:0 0RESHARD:0 0UNSHARD:2 0F0:1 0RESHARD:1 0UNSHARD:0 0F0:2 0RESHARD:2 0UNSHARD:1"
    )
    assert show(lines)[1] == "0F1:0 0RESHARD:0 0UNSHARD:2 0F1:1 0F1:2"


def test_gradients_alone():
    (actions,) = parse("0F0 0B0 0REDUCE")
    lines = expand(actions, {0: units(0, 1, zero=2, reduced=[1])})
    assert show(lines) == ["0F0:0 0F0:1", "0B0:1 0REDUCE:1 0B0:0", "0REDUCE"]
    check_units(lines, {0: units(0, 1, zero=2, reduced=[1])})


def test_where_backward_is_split_gradients_are_reduced_behind_the_weights():
    (actions,) = parse("0F0 0I0 0F1 0W0 0I1 0W1 0REDUCE")
    lines = expand(actions, {0: units(0, 1)})
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
    (actions,) = parse("0F0 2F0 2B0 0B0")
    lines = expand(actions, {2: units(4)})
    assert show(lines) == ["0F0", "2UNSHARD:4 2F0:4", "2B0:4 2REDUCE:4 2RESHARD:4", "0B0"]


def test_evaluation_only():
    (actions,) = parse("0F0 0F1")
    lines = expand(actions, {0: units(0, 1)})
    assert show(lines) == ["0UNSHARD:0 0UNSHARD:1 0F0:0 0F0:1", "0F1:0 0RESHARD:0 0F1:1 0RESHARD:1"]


@given(
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    name=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    layers=st.integers(1, 4),
    zero=st.sampled_from([2, 3]),
)
def test_expansions_keep_the_rules(stages, microbatches, name, layers, zero):
    for stage, actions in enumerate(generate(stages, microbatches, name)):
        known = {stage: units(*range(layers), zero=zero)}
        lines = expand(actions, known)
        check_units(lines, known)
        flat = [action for line in lines for action in line]
        for kinds in (ActionKind.FORWARD,), INPUT_BACKWARDS, (ActionKind.REDUCE_GRADIENTS,):
            assert sum(action.kind in kinds for action in flat) == microbatches * layers
        computed = [(action.kind, action.microbatch) for action in flat if action.microbatch is not None]
        assert list(dict.fromkeys(computed)) == [(action.kind, action.microbatch) for action in actions]


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
        check_units(parse(text), {0: units(0, 1, 2)})


def use(name, module, *regions, trained=True):
    slots = ((module, name.rpartition(".")[2], regions),)
    return ParameterUse(name=name, slots=slots, shape=(2,), dtype="float32", requires_grad=trained)


MAP = ModuleMap(
    step="training_step",
    blocks=("h.0", "h.1", "h.2"),
    cuts=((), ()),
    parameters=(
        use("wte.weight", "wte", -1, 2),
        use("h.0.w", "h.0", 0),
        use("h.1.mlp.w", "h.1.mlp", 1),
        use("h.1.frozen", "h.1", 1, trained=False),
        use("bridge", "", 1),
        use("h.2.w", "h.2", 2),
        use("norm", "", 2),
        use("h.2.branch", "h.2"),
        use("sometimes", ""),
        use("h.10.w", "h.10", 2),
    ),
)


def test_units_of_a_module():
    assert shard_units(MAP, ((0, 3),), 0) == (
        ShardUnit(unit=HEAD, names=("wte.weight", "sometimes"), reduced=("wte.weight", "sometimes")),
        ShardUnit(unit=0, names=("h.0.w", "sometimes"), reduced=("h.0.w",)),
        ShardUnit(unit=1, names=("h.1.mlp.w", "h.1.frozen", "bridge", "sometimes"), reduced=("h.1.mlp.w", "bridge")),
        ShardUnit(unit=2, names=("h.2.w", "h.2.branch", "sometimes"), reduced=("h.2.w", "h.2.branch")),
        ShardUnit(unit=TAIL, names=("wte.weight", "norm", "sometimes", "h.10.w"), reduced=("norm", "h.10.w")),
    )


def test_units_of_a_pipeline():
    first, second = (shard_units(MAP, ((0, 2), (2, 3)), stage) for stage in (0, 1))
    assert [unit.unit for unit in first] == [HEAD, 0, 1]
    assert [unit.unit for unit in second] == [2, TAIL]
    assert second[1].names == ("wte.weight", "norm", "sometimes", "h.10.w")
    assert second[0].reduced == ("h.2.w", "h.2.branch", "sometimes")
    assert second[1].reduced == ("wte.weight", "norm", "h.10.w")


def test_parameters_that_are_used_anywhere_are_one_unit():
    mixed = replace(MAP, exclusions=(Exclusion(feature="shards", reason="a parameter is used somewhere else"),))
    (unit,) = shard_units(mixed, ((0, 3),), 0)
    assert (unit.unit, len(unit.names), len(unit.reduced)) == (HEAD, 10, 9)
