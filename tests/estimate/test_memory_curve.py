import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict, with_units
from lightning_mist.errors import PlanError
from lightning_mist.estimate.memory_curve import memory_curves
from lightning_mist.plan import OffloadRatios, from_json, plan_of, to_json
from lightning_mist.schedule import simulate_plan
from tests.specs import cluster, profile, spec

COPYING = dataclasses.replace(profile(), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=1e9)


def predicted(network=None, *, world_size=4, nodes=1, kind="cuda", **degrees):
    network = network or spec(8, measured=True)
    plan = plan_of(network.num_layers, world_size=world_size, global_batch_size=96, **degrees)
    machine = cluster(world_size, nodes=nodes, kind=kind)
    return dataclasses.replace(plan, predicted=predict(network, COPYING, machine, plan))


def curves(plan):
    return memory_curves(plan, simulate_plan(plan))


PIPELINES = [
    {"pipeline_stages": 1},
    {"pipeline_stages": 2},
    {"pipeline_stages": 4},
    {"pipeline_stages": 2, "schedule": "gpipe"},
    {"pipeline_stages": 4, "schedule": "gpipe"},
    {"pipeline_stages": 2, "schedule": "interleaved-1f1b", "chunks": 2},
    {"pipeline_stages": 4, "schedule": "interleaved-1f1b", "chunks": 2},
    {"pipeline_stages": 2, "schedule": "zb-h1"},
    {"pipeline_stages": 4, "schedule": "zb-h1"},
]


@pytest.mark.parametrize(("microbatches", "checkpointed"), [(4, 1), (12, 0)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_the_highest_point_is_the_predicted_peak(pipeline, zero, microbatches, checkpointed):
    plan = predicted(**pipeline, zero_stage=zero, num_microbatches=microbatches, checkpointed_layers=checkpointed)
    for curve in curves(plan):
        stage = plan.predicted.stages[curve.group]
        assert curve.peak_bytes == stage.peak_bytes
        assert curve.total_E.max() == pytest.approx(stage.peak_bytes, abs=len(curve.terms))
        at = curve.peak_index
        peak_terms = {name: round(float(values_E[at])) for name, values_E in curve.terms}
        assert peak_terms == {name: value for name, value in stage.breakdown if name in peak_terms}


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_where_activations_are_most_of_the_memory_too(pipeline):
    network = spec(8, measured=True, parameter_bytes=400, edge_bytes=400, tied=True)
    plan = predicted(network, **pipeline, zero_stage=1, num_microbatches=24)
    for curve in curves(plan):
        assert curve.peak_bytes == plan.predicted.stages[curve.group].peak_bytes
        assert curve.total_E.max() <= curve.peak_bytes + 1


@pytest.mark.parametrize(
    "offload",
    [{"optimizer": 0.5}, {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0}, {"activations": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("stages", [1, 2])
def test_what_lives_in_host_memory_is_not_on_the_curve(stages, offload):
    ratios = OffloadRatios(**offload)
    plan = predicted(pipeline_stages=stages, num_microbatches=4, zero_stage=1, offload=ratios)
    for curve in curves(plan):
        assert curve.peak_bytes == plan.predicted.stages[curve.group].peak_bytes


def test_a_curve_in_time():
    plan = predicted(pipeline_stages=2, num_microbatches=4)
    simulation = simulate_plan(plan)
    first, last = memory_curves(plan, simulation)
    for curve in (first, last):
        assert curve.end == simulation.makespan
        assert curve.times_E[0] == 0.0
        assert (np.diff(curve.times_E) >= 0).all()
        assert curve.times_E[-1] <= curve.end
        spans = {str(span.action): span for span in simulation.spans[curve.group]}
        starts = dict(zip(curve.names, curve.times_E, strict=True))
        assert all(starts[name] == spans[name].start for name in curve.names if name in spans)
    # The last stage waits for the first microbatch with what it holds all the time, and no working set.
    assert last.names[0] == "waiting"
    always = {name.removeprefix("always."): value for name, value in plan.predicted.stages[1].needs if "always" in name}
    assert {name: values_E[0] for name, values_E in last.terms if values_E[0]} == {
        **always,
        "transfer_bytes": dict(last.terms)["transfer_bytes"][0],
    }
    # More microbatches in flight, more activations.
    activations = dict(zip(first.names, dict(first.terms)["activation_bytes"], strict=True))
    assert activations["0F0"] < activations["0F1"]


def test_plan_files_say_what_memory_is_made_of():
    plan = predicted(pipeline_stages=2, num_microbatches=4, zero_stage=1)
    again = from_json(to_json(plan))
    assert again == plan
    for curve, other in zip(curves(plan), curves(again), strict=True):
        assert (curve.total_E == other.total_E).all()


def test_a_prediction_that_does_not_say_is_refused():
    plan = predicted(pipeline_stages=2, num_microbatches=4)
    stages = tuple(dataclasses.replace(stage, needs=()) for stage in plan.predicted.stages)
    bare = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, stages=stages))
    with pytest.raises(PlanError, match=r"predicted\.stages\[\.\.\]\.needs"):
        memory_curves(bare, simulate_plan(plan))
    with pytest.raises(PlanError, match="made of"):
        memory_curves(dataclasses.replace(plan, predicted=None), simulate_plan(plan))


def by_units(**options):
    plan = predicted(**options)
    return with_units(StageCostModel(spec(8, measured=True), COPYING, cluster(4, kind="cuda")), plan)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("moved", [None, OffloadRatios(activations=0.5, gradients=1.0)], ids=["kept", "moved"])
def test_units_are_as_high_as_the_piece_that_they_are_of(pipeline, zero, moved):
    options = {} if moved is None else {"offload": moved}
    plan = by_units(**pipeline, zero_stage=zero, num_microbatches=12, checkpointed_layers=1, **options)
    for curve in curves(plan):
        pieces = curve.within(0.0, curve.end)
        assert (np.diff(pieces.times_E) >= 0).all()
        assert (pieces.there_E <= pieces.most_E * (1 + 1e-9) + 1e-6).all()
        most_E = np.full(len(curve.names), -np.inf)
        np.maximum.at(most_E, pieces.index_E, pieces.most_E)
        # What happens in no time at the very end has no room.
        lasts_E = curve.times_E < curve.end
        assert most_E[lasts_E] == pytest.approx(dict(curve.terms)["working_bytes"][lasts_E])


def test_units_come_in_the_order_in_which_they_run():
    (curve,) = curves(by_units(pipeline_stages=1, num_microbatches=2))
    (forward, backward) = curve.pair()
    units = ["head", *map(str, range(8)), "tail"]
    for index, wanted in ((forward, units), (backward, units[::-1])):
        start, end = curve.time_of(index)
        pieces = curve.within(start, end)
        assert [name for name in pieces.names if name] == wanted
        assert set(pieces.index_E) == {index}
        middle = curve.within((start + end) / 2, end)
        assert 0 < sum(map(bool, middle.names)) <= len(wanted)
        assert middle.times_E[0] == (start + end) / 2


def test_without_units_pieces_are_whole():
    (curve,) = curves(predicted(pipeline_stages=1, num_microbatches=2))
    pieces = curve.within(0.0, curve.end)
    assert (pieces.times_E == curve.times_E[curve.times_E < curve.end]).all()
    assert not any(pieces.names)
    assert not pieces.there_E.any()
    assert curve.pair() is None
