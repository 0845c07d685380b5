import pytest
from torch import nn

from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import Predicted, PredictedStage
from lightning_mist.strategy.planning.memory_budget import (
    lack_for_whole,
    refuse_whole,
    refuse_whole_alone,
    whole_module_bytes,
)
from tests.plans import plan_of


def module():
    net = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False), nn.BatchNorm1d(1, affine=False))
    net[1].weight = net[0].weight
    return net


WHOLE = 10 * 10 * 4 + (1 + 1) * 4 + 8
"""The tied weight once, running mean and variance, and the count of batches."""


def plan(stages=2, predicted=True, *, dp=1, tp=1, zero=0):
    prediction = PredictedStage(
        steady_seconds=1.0,
        boundary_seconds=0.0,
        forward_seconds=0.5,
        backward_seconds=0.5,
        peak_bytes=1,
        breakdown=(("parameter_bytes", 100.0), ("optimizer_bytes", 200.0)),
    )
    told = Predicted(step_seconds=1.0, stages=(prediction,) * stages) if predicted else None
    return plan_of(2 * dp, 2, *[{"data": dp, "tensor": tp, "zero": zero}] * stages, predicted=told)


def test_each_stage_holds_the_whole_module_and_the_state_of_its_own():
    assert whole_module_bytes(plan(), module()) == (WHOLE + 300, WHOLE + 300)


def test_a_pipeline_that_cannot_be_made_whole_lacks_memory():
    assert lack_for_whole(plan(), module(), (WHOLE + 300,) * 2) is None
    assert "stage 0 of 2" in lack_for_whole(plan(), module(), (WHOLE + 299,) * 2)


def test_one_stage_and_plans_without_prediction_are_not_judged():
    assert lack_for_whole(plan(stages=1), module(), (1,)) is None
    assert lack_for_whole(plan(predicted=False), module(), (1, 1)) is None


@pytest.mark.parametrize(
    ("options", "is_whole"), [({"tp": 2}, False), ({"dp": 2, "zero": 3}, False), ({"dp": 2, "zero": 2}, True)]
)
def test_a_single_stage_in_parts_is_judged_too(options, is_whole):
    if is_whole:
        assert lack_for_whole(plan(stages=1, **options), module(), (1,)) is None
        return
    assert lack_for_whole(plan(stages=1, **options), module(), (WHOLE + 300,)) is None
    assert "validation during fit makes the module whole" in lack_for_whole(
        plan(stages=1, **options), module(), (WHOLE + 299,)
    )


def test_it_is_refused_only_if_it_must_be_whole_and_does_not_fit():
    refuse_whole(None, "a hook looks at it")
    refuse_whole("it takes 3 GiB", None)
    with pytest.raises(InfeasibleError, match=r"3 GiB\. It is made whole because a hook.*limit_val_batches=0"):
        refuse_whole("it takes 3 GiB", "a hook looks at it")


@pytest.mark.parametrize(("has_plan", "way"), [(True, "Change that, or raise"), (False, r"Give the plan of a fit")])
def test_outside_of_a_fit_parameters_and_buffers_must_fit(has_plan, way):
    refuse_whole_alone(module(), WHOLE, "a hook looks at it", has_plan=has_plan)
    refuse_whole_alone(module(), None, "a hook looks at it", has_plan=has_plan)
    with pytest.raises(InfeasibleError, match=rf"416 B, and memory_limit is 415 B.*because a hook looks at it\. {way}"):
        refuse_whole_alone(module(), WHOLE - 1, "a hook looks at it", has_plan=has_plan)
