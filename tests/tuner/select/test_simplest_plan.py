import dataclasses

import pytest

from lightning_mist.cost import StageCostModel, predict, predict_with
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.plan import SearchSpace
from lightning_mist.plan.changes import burdens
from lightning_mist.tuner.select.schedule_variants import PlanRoom
from lightning_mist.tuner.select.selection import (
    ALIKE,
    drop_savings,
    shapes,
    simplest,
    simplicity,
    why_simpler,
)
from lightning_mist.tuner.space.applied_space import apply
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline

PLAIN = pipeline({"layers": 4, "data": 2}, {"layers": 4, "data": 2})


def both(**changes):
    """A plan of two stages that differ from the plain ones."""
    return pipeline(*[{"layers": 4, "data": 2, **changes}] * 2)


@pytest.mark.parametrize(
    ("plan", "used"),
    [
        (PLAIN, ()),
        (both(zero=1), ("sharded optimizer state",)),
        (both(zero=3), ("sharded optimizer state", "sharded gradients", "sharded parameters")),
        (both(data=1, zero=2), ()),
        (both(checkpointed=1), ("recomputation",)),
        (both(tensor=2), ("tensor parallelism",)),
        (both(tensor=2, sequence=True), ("sequence parallelism", "tensor parallelism")),
        (both(offload={"optimizer": 0.5}), ("optimizer state in host memory",)),
        (dataclasses.replace(PLAIN, schedule="gpipe"), ()),
        (dataclasses.replace(PLAIN, schedule="zb-h1"), ("zb-h1",)),
        (pipeline({"layers": 8, "data": 2}, schedule="zb-h1"), ()),
    ],
)
def test_techniques_are_what_a_plan_does_beyond_computing_once(plan, used):
    assert burdens(plan) == used


def test_stages_have_one_shape_wherever_they_are():
    assert shapes(PLAIN) == 1
    assert shapes(pipeline({"layers": 4, "data": 2}, {"layers": 4, "data": 2, "checkpointed": 1})) == 2
    assert shapes(pipeline({"layers": 3}, {"layers": 5}, {"layers": 3})) == 2


def test_fewer_techniques_count_before_fewer_shapes_and_these_before_fewer_stages():
    one = pipeline({"layers": 8, "data": 4, "checkpointed": 1})
    uneven = pipeline({"layers": 5, "data": 2}, {"layers": 3, "data": 2})
    four = pipeline(*[{"layers": 2}] * 4)
    assert sorted([one, uneven, four, PLAIN], key=simplicity) == [PLAIN, four, uneven, one]
    assert why_simpler(PLAIN, one) == "it does without recomputation"
    assert why_simpler(PLAIN, both(zero=2)) == "it does without sharded optimizer state and sharded gradients"
    assert why_simpler(four, uneven) == "it has 1 kind of stages in place of 2"
    assert why_simpler(PLAIN, four) == "it has 2 stages in place of 4"


def test_only_plans_that_cannot_be_told_apart_are_weighed():
    fast, near = both(checkpointed=1), PLAIN
    assert simplest([(fast, 1.0), (near, 1 + 0.9 * ALIKE)]) is near
    assert simplest([(fast, 1.0), (near, 1 + 1.1 * ALIKE)]) is fast
    # Of equally simple ones it is the fastest, in whatever order they come.
    other = both(zero=1)
    assert simplest([(other, 1 + 0.5 * ALIKE), (fast, 1.0)]) is fast
    assert simplest([(fast, 1.0), (other, 1 + 0.5 * ALIKE)]) is fast


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


def room(device, host, zero_stages=EVERY):
    """So many bytes of devices and of their hosts, for each stage."""
    space = apply(SearchSpace(zero_stages=zero_stages), NETWORK, 4, 4)
    return PlanRoom(MODEL, space, lambda item: device, lambda item: host)


def within(plan, more=0.0, zero_stages=EVERY):
    """As much memory of devices as a plan needs, and more."""
    most = [memory.peak_bytes + more for memory in plan_memory(MODEL.memory, plan)]
    return room(most, [1e12] * plan.num_stages, zero_stages)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-1f1b"])
def test_what_nothing_is_lost_by_is_left_out(schedule):
    plan = saving(schedule, zero=1, offload={"optimizer": 0.25, "gradients": 0.5})
    assert len(burdens(plan)) == 4
    found = drop_savings(within(plan, 1e9), plan)
    assert burdens(found) == (schedule,)
    assert found.predicted == predict(NETWORK, FAST, cluster(4), found)
    assert found.predicted.step_seconds <= plan.predicted.step_seconds * (1 + ALIKE)


def test_what_memory_asks_for_stays():
    plan = saving(zero=1, offload={"gradients": 1.0})
    assert drop_savings(within(plan), plan) is plan


def test_host_memory_counts_too():
    plan = saving(offload={"optimizer": 1.0, "activations": 1.0})
    roomy, none = room([1e12] * 2, [1e12] * 2), room([1e12] * 2, [0.0] * 2)
    assert roomy.fits(plan)
    assert not none.fits(plan)
    # With nothing moved it is not asked for.
    assert none.fits(drop_savings(roomy, plan))


def test_only_what_may_be_is_tried():
    plan = saving(zero=1)
    plan = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, zero_stage=1) for stage in plan.stages), predicted=plan.predicted
    )
    assert drop_savings(within(plan, 1e9, (1, 2)), plan) is plan
    assert burdens(drop_savings(within(plan, 1e9, (0, 1)), plan)) == ("zb-h1",)


def test_what_takes_longer_is_not_simpler():
    # If sharing out saved a tenth, every plan without it would be slower.
    plan = saving(zero=1)
    faster = dataclasses.replace(
        plan, predicted=dataclasses.replace(plan.predicted, step_seconds=plan.predicted.step_seconds * 0.9)
    )
    assert drop_savings(within(plan, 1e9), faster) is faster
