from dataclasses import asdict
from statistics import median

import pytest
import torch

from lightning_mist.cost.time.runtime_overheads import SPLIT_BACKWARD
from lightning_mist.hardware import StepOverheads
from lightning_mist.model import map_module, trace_model
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.lowering import lower
from lightning_mist.schedule.stage_program import lines_of
from lightning_mist.schedule.stage_units import expanded_units, plan_units
from lightning_mist.strategy.planning import local_machine as overheads
from tests.specs import profile

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


def run(forward, backward, *, around=0.0, first=True, **posts):
    seconds = {FORWARD: forward, BACKWARD: backward, **{ActionKind[name]: value for name, value in posts.items()}}
    return overheads._Run(first_stage=first, around=around, seconds=seconds)


def collective(operation, payload):
    return overheads._collective(profile(), operation, payload)


def test_operators_are_counted_as_the_trace_counts_them():
    network, batch = overheads._Network(), torch.randn(overheads.ROWS, overheads.LENGTH, overheads.WIDTH)
    found = map_module(network, network.training_step, batch, blocks="blocks")
    spec = trace_model(network, batch, call=network.training_step, module_map=found, optimizer=torch.optim.SGD)
    assert spec.head.forward_operators == overheads.HEAD_OPERATORS
    assert [layer.forward_operators for layer in spec.layers] == [overheads.BLOCK_OPERATORS]
    assert [layer.backward_operators for layer in spec.layers] == [overheads.BLOCK_BACKWARD_OPERATORS]
    assert spec.num_layers == overheads.LAYERS


def test_what_the_network_itself_takes_is_taken_off():
    found = overheads._overheads(profile(), {"data": run(1.5, 2.7, around=0.25)}, (1.0, 2.0))
    assert found.action_seconds == pytest.approx((0.5 + 0.7) / 2)
    assert (found.step_seconds, found.exchange_seconds, found.message_seconds) == (0.25, 0.0, 0.0)


def test_a_later_stage_tells_of_stand_ins_and_messages():
    runs = {
        "data": run(1.0, 2.0, around=0.1),
        "pipeline": run(3.5, 1.0, around=2.1, first=False, RECV_ACTIVATION=0.2, SEND_GRADIENT=0.4),
    }
    found = overheads._overheads(profile(), runs, (1.0, 2.0))
    assert found.stand_in_seconds == pytest.approx((3.5 - 0.5) / overheads.HEAD_OPERATORS)
    assert found.message_seconds == pytest.approx(0.3)
    assert found.exchange_seconds == pytest.approx(2.0)


def test_recomputation_is_more_than_the_second_forward():
    runs = {"data": run(1.0, 2.0), "recomputed": run(1.25, 3.75)}
    found = overheads._overheads(profile(), runs, (1.0, 2.0))
    assert found.recomputed_layer_seconds == pytest.approx(1.0 / overheads.LAYERS)


def test_putting_off_gradients_of_weights_is_counted_by_operator():
    pipeline = run(1.0, 2.0, RECV_ACTIVATION=0.1)
    split_backward = run(1.0, 0.0, BACKWARD_INPUT=1.5, BACKWARD_WEIGHT=1.1)
    found = overheads._overheads(
        profile(), {"data": pipeline, "pipeline": pipeline, "split backward": split_backward}, (1.0, 2.0)
    )
    operators = overheads.LAYERS / 2 * overheads.BLOCK_BACKWARD_OPERATORS
    assert found.deferred_operator_seconds == pytest.approx(0.6 / operators)


def test_collectives_of_the_profile_are_no_overhead():
    operators = overheads.LAYERS * overheads.BLOCK_OPERATORS
    summed = 2 * overheads.LAYERS * collective("all_reduce", 4 * overheads.LENGTH * overheads.WIDTH)
    moves = overheads.UNIT_MOVES
    given = moves * 2 * collective("broadcast", 4 * overheads.WIDTH**2)
    runs = {
        "data": run(1.0, 2.0),
        "tensor": run(0.5 + operators * 0.01, 1.0 + SPLIT_BACKWARD * operators * 0.01 + summed),
        "shards": run(1.0, 2.0 + moves * 0.02 + given),
    }
    found = overheads._overheads(profile(), runs, (1.0, 2.0))
    assert found.split_operator_seconds == pytest.approx(0.01)
    assert found.unit_seconds == pytest.approx(0.02)


def test_units_are_counted_as_the_list_moves_them():
    network, batch = overheads._Network(), torch.randn(overheads.ROWS, overheads.LENGTH, overheads.WIDTH)
    found = map_module(network, network.training_step, batch, blocks="blocks")
    plan = overheads._plan(2, zero_stage=3)
    units = expanded_units(plan, found, plan_units(plan, found, 0))
    (actions,) = lower(plan, tied=False)
    moves = {FORWARD: [], BACKWARD: []}
    for action, line in zip(actions, lines_of(actions, units), strict=True):
        if action.kind in moves:
            kinds = (ActionKind.UNSHARD, ActionKind.REDUCE_GRADIENTS)
            moves[action.kind].append(sum(item.kind in kinds for item in line))
    assert len(moves[FORWARD]) == overheads.ROWS
    assert median(moves[FORWARD]) + median(moves[BACKWARD]) == overheads.UNIT_MOVES


def test_nothing_is_negative():
    found = overheads._overheads(profile(), {"data": run(0.5, 1.0)}, (1.0, 2.0))
    assert found.action_seconds == 0.0


def _measure() -> dict[str, float]:
    return asdict(overheads.measure_overheads(profile(), torch.device("cpu"), 2))


@pytest.mark.thorough
def test_two_ranks_measure_the_same(gloo_workers, monkeypatch):
    first, second = gloo_workers.run(2, _measure)
    assert first == second
    assert set(first) == set(asdict(StepOverheads()))
    # Nothing is said of how long anything takes, but that these cannot take no time at all.
    assert min(first["step_seconds"], first["message_seconds"], first["exchange_seconds"]) > 0
