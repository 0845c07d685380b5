import dataclasses

import pytest

from lightning_mist.cost import (
    StageCostModel,
    predict,
    predict_with,
    prediction,
    seconds_with,
    stage_memory,
    step_seconds,
)
from lightning_mist.errors import PlanError
from lightning_mist.hardware import StepOverheads
from lightning_mist.plan import OffloadRatios, StageMesh, from_json, to_json
from lightning_mist.schedule import simulate_plan
from tests.cost.inputs.test_context_parallel import sequences
from tests.cost.inputs.test_placement import make_plan as exchanging
from tests.cost.memory.test_memory_model import make_plan
from tests.cost.memory.test_offload_bytes import make_plan as offloading
from tests.specs import cluster, profile, spec

NETWORK = spec(6, tied=True, measured=True)


def predicted(plan, **kwargs):
    return predict(NETWORK, profile(), cluster(plan.world_size, **kwargs), plan)


PLAN = make_plan([2, 4], degree=2, microbatches=4, rows=2, zero=1, checkpointed=1)


def test_what_a_model_remembers_is_what_a_new_one_finds():
    model = StageCostModel(NETWORK, profile(), cluster(PLAN.world_size))
    first = predict_with(model, PLAN)
    assert predict_with(model, dataclasses.replace(PLAN, predicted=first)) == first
    assert first == predict(NETWORK, profile(), cluster(PLAN.world_size), PLAN)


def test_plans_asked_about_together_are_those_asked_about_alone(monkeypatch):
    plans = [dataclasses.replace(PLAN, schedule=name) for name in ("1f1b", "gpipe", "zb-h1", "gpipe")]
    alone = [predicted(plan) for plan in plans]
    for kept in (1, 2, 4):
        monkeypatch.setattr(prediction, "PLANS", kept)
        model = StageCostModel(NETWORK, profile(), cluster(PLAN.world_size))
        for some in (plans[:1], plans[:0], plans, plans[::-1]):
            assert prediction.predictions(model, some) == [alone[plans.index(plan)] for plan in some]
            assert max(len(known) for known in (model.terms, model.clocked, model.predicted)) <= kept


def test_the_seconds_of_a_plan_are_those_of_its_prediction():
    model = StageCostModel(NETWORK, profile(), cluster(PLAN.world_size))
    for name in ("1f1b", "gpipe", "zb-h1"):
        plan = dataclasses.replace(PLAN, schedule=name)
        assert seconds_with(model, plan) == predict_with(model, plan).step_seconds


def test_terms_add_up():
    plan = make_plan([2, 4], degree=2, microbatches=4, rows=2, zero=1, checkpointed=1)
    found = predicted(plan)
    assert len(found.stages) == 2
    for stage, memory in zip(found.stages, stage_memory(NETWORK, plan), strict=True):
        terms = dict(stage.breakdown)
        assert stage.peak_bytes == memory.peak_bytes
        assert sum(value for name, value in terms.items() if name.endswith("_bytes")) == stage.peak_bytes
        steady = sum(terms[f"{name}_seconds"] for name in ("forward", "backward", "recompute", "transfer"))
        assert stage.steady_seconds == pytest.approx(steady)
        boundary = sum(terms[f"{name}_seconds"] for name in ("reduce", "tied", "update", "once", "gather"))
        assert stage.boundary_seconds == pytest.approx(boundary)
        assert stage.forward_seconds + stage.backward_seconds == pytest.approx(steady - terms["transfer_seconds"])
        assert sum(value for _, value in stage.spent) == pytest.approx(found.step_seconds)
    steady = [stage.steady_seconds for stage in found.stages]
    boundary = [stage.boundary_seconds for stage in found.stages]
    assert found.step_seconds == pytest.approx(step_seconds(steady, boundary, 4), rel=0.1)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_a_prediction_runs_on_a_clock_as_it_was_predicted(kind, schedule):
    plan = make_plan([1, 2, 2, 1], degree=2, microbatches=4, rows=1, zero=1)
    stages = plan.stages
    if schedule == "interleaved-1f1b":
        stages = tuple(dataclasses.replace(stage, mesh=stages[index % 2].mesh) for index, stage in enumerate(stages))
    plan = dataclasses.replace(plan, schedule=schedule, stages=stages)
    overheads = StepOverheads(step_seconds=1e-3, action_seconds=1e-4, message_seconds=1e-5)
    machine = dataclasses.replace(profile(), overheads=overheads)
    found = predict(NETWORK, machine, cluster(plan.world_size, kind=kind), plan)
    simulated = simulate_plan(from_json(to_json(dataclasses.replace(plan, predicted=found))))
    assert simulated.makespan == pytest.approx(found.step_seconds)
    overhead = dict(found.stages[0].spent)["overhead_seconds"]
    without = predict(NETWORK, profile(), cluster(plan.world_size, kind=kind), plan)
    assert overhead > 1e-3 + 2 * 4 * 1e-4
    assert found.step_seconds - without.step_seconds >= overhead * 0.99


def test_one_rank_that_serves_four_sends_to_each_of_them():
    plan, network = exchanging([(1, 1), (4, 1)]), spec(2, measured=True)
    found, on_device = (
        predict(network, profile(), cluster(plan.world_size, kind=kind), plan) for kind in ("cpu", "cuda")
    )
    front, behind = (dict(stage.breakdown) for stage in found.stages)
    row = 1000 / 1e8
    # Four rows in four messages on the one side, one in one on the other.
    assert front["send_seconds"] == front["return_seconds"] == pytest.approx(4e-4 + 4 * row)
    assert behind["arrival_seconds"] == behind["send_back_seconds"] == pytest.approx(1e-4 + row)
    assert front["send_back_seconds"] == behind["send_seconds"] == 0.0
    for term in (front, behind):
        parts = sum(term[f"{name}_seconds"] for name in ("arrival", "return", "send", "send_back"))
        assert term["transfer_seconds"] == pytest.approx(parts)
    simulated = simulate_plan(from_json(to_json(dataclasses.replace(plan, predicted=found))))
    assert simulated.makespan == pytest.approx(found.step_seconds)
    # The one rank sends and receives for all of them, in every microbatch, and does nothing else meanwhile.
    assert found.step_seconds > plan.num_microbatches * found.stages[0].steady_seconds
    for stage in on_device.stages:
        terms = dict(stage.breakdown)
        assert terms["send_seconds"] == terms["send_back_seconds"] == 0.0


def changed(plan, **kwargs):
    return dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], **kwargs), *plan.stages[1:]))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (
            {
                "mesh": StageMesh(devices=(0, 1), data_parallel_degree=1, tensor_parallel_degree=2),
                "microbatch_size": 8,
            },
            "tensor_parallel_degree = 2: what that costs is not known for synthetic; use 1",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(kwargs, match):
    plan = make_plan([6], degree=2, rows=4)
    with pytest.raises(PlanError, match=match):
        predicted(changed(plan, **kwargs))


def test_what_is_not_run_yet_is_predicted():
    plan = make_plan([3, 3], degree=2, rows=4)
    plain, moving = (predicted(changed(plan, offload=OffloadRatios(optimizer=ratio))) for ratio in (0.0, 1.0))
    terms = [dict(item.stages[0].breakdown) for item in (plain, moving)]
    assert terms[0]["update_copies_seconds"] == 0.0 < terms[1]["update_copies_seconds"]
    assert terms[1]["optimizer_bytes"] == 0
    assert moving.step_seconds > plain.step_seconds
    uses = sequences(6)
    plan = make_plan([6], degree=2, rows=4)
    ring = StageMesh(devices=(0, 1), context_parallel_degree=2)
    shared = predict(uses, profile(), cluster(2), changed(plan, mesh=ring, microbatch_size=8))
    assert dict(shared.stages[0].breakdown)["ring_seconds"] > 0.0
    with pytest.raises(PlanError, match="synthetic was traced without a sequence dimension"):
        predicted(changed(plan, mesh=ring, microbatch_size=8))


def test_giving_out_parameters_in_a_ring_is_part_of_the_simulated_step():
    ring = StageMesh(devices=(0, 1), context_parallel_degree=2)
    plan = changed(make_plan([6], degree=2, rows=4, zero=1), mesh=ring, microbatch_size=8)
    found = predict(sequences(6), profile(), cluster(2), plan)
    gather = dict(found.stages[0].breakdown)["gather_seconds"]
    assert gather > 1e-3
    simulated = simulate_plan(dataclasses.replace(plan, predicted=found))
    assert simulated.makespan == pytest.approx(found.step_seconds)


def test_a_plan_for_something_else_is_refused():
    with pytest.raises(PlanError, match="the plan has 5 layers, synthetic has 6"):
        predicted(make_plan([5]))
    with pytest.raises(PlanError, match="the plan has 2 devices, the cluster 4"):
        predict(NETWORK, profile(), cluster(4), make_plan([6], degree=2))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved-1f1b", 2)])
def test_copies_are_part_of_a_step_under_every_schedule(kind, schedule, chunks):
    slow = dataclasses.replace(profile(), host_to_device_bytes_per_second=1e6, device_to_host_bytes_per_second=1e6)
    everything = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 1.0)
    plain, moving = (
        predict(spec(8, measured=True), slow, cluster(2, kind=kind), offloading(schedule, chunks=chunks, **ratios))
        for ratios in ({}, everything)
    )
    for stage in moving.stages:
        spent = dict(stage.spent)
        assert sum(spent.values()) == pytest.approx(moving.step_seconds)
        assert spent["copies_seconds"] > 0.0
    assert dict(plain.stages[0].spent)["copies_seconds"] == 0.0
    assert moving.step_seconds > plain.step_seconds
