from dataclasses import replace

import pytest

from lightning_mist.cost import StageCostModel, seconds_with
from lightning_mist.tuner.select.selection import in_every_layout
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline

STAGE = {"layers": 2, "data": 2}


def model_of(*, parameter_bytes, width, nodes=2):
    """Four devices, in two nodes between which everything takes a hundred times as long."""
    rates = profile(link=1e9, latency=1e-6)
    slow = tuple(replace(cost, num_nodes=2, bytes_per_second=1e7) for cost in rates.collectives)
    network = spec(4, parameter_bytes=parameter_bytes, widths=(width, width))
    machine = cluster(4, nodes=nodes, kind="cuda")
    return StageCostModel(network, replace(rates, collectives=(*rates.collectives, *slow)), machine)


def fastest(model, plan, *best):
    (layouts,) = in_every_layout(model, [plan])
    found, seconds = layouts.fastest(model, *best)
    assert layouts.floor <= seconds == seconds_with(model, found)
    return found


def test_much_to_average_keeps_stages_together():
    model = model_of(parameter_bytes=4_000_000, width=10)
    found = fastest(model, pipeline(STAGE, STAGE, per_node=2))
    assert [stage.devices for stage in found.stages] == [(2, 3), (0, 1)]


def test_much_to_hand_on_keeps_replicas_together():
    model = model_of(parameter_bytes=400, width=100_000)
    plan = pipeline(STAGE, STAGE, per_node=2)
    found = fastest(model, plan)
    assert [stage.devices for stage in found.stages] == [(1, 3), (0, 2)]
    assert seconds_with(model, found) < seconds_with(model, plan)


def test_what_is_too_slow_in_any_layout_stays_as_it_is():
    model = model_of(parameter_bytes=400, width=100_000)
    plan = pipeline(STAGE, STAGE, per_node=2)
    seconds = seconds_with(model, plan)
    assert fastest(model, plan, seconds / 2) == plan
    assert fastest(model, plan, seconds) != plan


@pytest.mark.parametrize("stages", [(STAGE, STAGE), ({"layers": 4, "data": 4},)])
def test_within_a_node_or_of_one_stage_nothing_is_tried(stages):
    model = model_of(parameter_bytes=400, width=100_000, nodes=1)
    plan = pipeline(*stages)
    assert fastest(model, plan) == plan
