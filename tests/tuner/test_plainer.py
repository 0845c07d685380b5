"""What a plan under another schedule does without."""

import dataclasses

import pytest

from lightning_mist.cost import StageCostModel, predict, predict_with
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.tuner import simpler
from lightning_mist.tuner.plainer import fits_within, plainer
from lightning_mist.tuner.simpler import techniques
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline

FAST = dataclasses.replace(
    profile(link=1e15, latency=0.0), host_to_device_bytes_per_second=1e15, device_to_host_bytes_per_second=1e15
)
NETWORK = spec(8, parameter_bytes=4000, edge_bytes=4000, measured=True)
MODEL = StageCostModel(NETWORK, FAST, cluster(4))
EVERY = (0, 1, 2, 3)


def saving(schedule="zb-h1", **saved):
    """A plan, with its prediction, whose second stage saves something that costs nothing on such a machine."""
    groups = {"groups": 2} if schedule == "interleaved-1f1b" else {}
    stages = [{"layers": 4, "data": 2}, {"layers": 4, "data": 2, **saved}]
    if groups:
        stages = [{"layers": 2, "data": 2}, {"layers": 2, "data": 2, **saved}] * 2
    plan = pipeline(*stages, schedule=schedule, **groups)
    return dataclasses.replace(plan, predicted=predict_with(MODEL, plan))


def within(plan, more=0.0):
    """Whether plans fit into as much memory of devices as a plan needs, and more."""
    most = [memory.peak_bytes + more for memory in plan_memory(MODEL.memory, plan)]
    return fits_within(MODEL, lambda item: most, lambda item: [1e12] * item.num_stages)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-1f1b"])
def test_what_nothing_is_lost_by_is_left_out(schedule):
    plan = saving(schedule, zero=1, offload={"optimizer": 0.25, "gradients": 0.5})
    assert len(techniques(plan)) == 4
    found = plainer(MODEL, plan, within(plan, 1e9), EVERY)
    assert techniques(found) == (schedule,)
    assert found.predicted == predict(NETWORK, FAST, cluster(4), found)
    assert found.predicted.step_seconds <= plan.predicted.step_seconds * (1 + simpler.ALIKE)


def test_what_memory_asks_for_stays():
    plan = saving(zero=1, offload={"gradients": 1.0})
    assert plainer(MODEL, plan, within(plan), EVERY) is plan


def test_host_memory_counts_too():
    plan = saving(offload={"optimizer": 1.0, "activations": 1.0})
    roomy = fits_within(MODEL, lambda item: [1e12] * 2, lambda item: [1e12] * 2)
    none = fits_within(MODEL, lambda item: [1e12] * 2, lambda item: [0.0] * 2)
    assert roomy(plan)
    assert not none(plan)
    # With nothing moved it is not asked for.
    assert none(plainer(MODEL, plan, roomy, EVERY))


def test_only_what_may_be_is_tried():
    plan = saving(zero=1)
    plan = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, zero_stage=1) for stage in plan.stages), predicted=plan.predicted
    )
    assert plainer(MODEL, plan, within(plan, 1e9), (1, 2)) is plan
    assert techniques(plainer(MODEL, plan, within(plan, 1e9), (0, 1))) == ("zb-h1",)


def test_what_takes_longer_is_not_simpler():
    # If sharing out saved a tenth, every plan without it would be slower.
    plan = saving(zero=1)
    faster = dataclasses.replace(
        plan, predicted=dataclasses.replace(plan.predicted, step_seconds=plan.predicted.step_seconds * 0.9)
    )
    assert plainer(MODEL, faster, within(plan, 1e9), EVERY) is faster
