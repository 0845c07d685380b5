from dataclasses import replace

import pytest

from lightning_mist.errors import InfeasibleError, TraceError
from lightning_mist.estimate import estimate_memory
from lightning_mist.explain import estimate_of
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import OffloadRatios, Predicted, PredictedStage, plan_of
from lightning_mist.strategy.planning.memory_budget import Budget, estimate_given
from tests.cost.events import with_events
from tests.specs import spec

NETWORK = with_events(spec(4, parameter_bytes=40_000_000))
PLAN = plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2)
STAGE = PredictedStage(
    steady_seconds=0.3,
    boundary_seconds=0.1,
    forward_seconds=0.1,
    backward_seconds=0.2,
    peak_bytes=2**30,
    breakdown=(("parameter_bytes", 2.0**29), ("forward_seconds", 0.1)),
)
PREDICTED = replace(PLAN, predicted=Predicted(step_seconds=1.0, stages=(STAGE, replace(STAGE, peak_bytes=2**31))))
GPUS, CPUS = parse_cluster("1x2xL4"), parse_cluster("2xcpu:8GiB")


def given(plan, cluster, asked=None, *, believed=True, refused=True, trace=lambda: NETWORK):
    said = []
    budget = Budget(cluster=cluster, asked=asked)
    found = estimate_given(
        plan, NETWORK.module_map, budget, believed=believed, refused=refused, trace=trace, say=said.append
    )
    return found, said


def test_a_made_plan_is_replayed_where_it_needs_most():
    found = estimate_of(NETWORK, GPUS, PLAN, None)
    assert found.worst.tensors
    assert found.memory_limit == GPUS.device.memory_bytes


def test_a_prediction_is_believed_where_the_plan_was_made_for_this():
    found, _ = given(PREDICTED, CPUS)
    assert found.source == "the plan's own prediction"
    assert [stage.allocated.p50 for stage in found.stages] == [2**30, 2**31]
    assert found.stages[0].term("parameter_bytes") == 2**29
    on_gpus, _ = given(PREDICTED, GPUS)
    assert on_gpus.worst.device_total.p50 > 2**31
    other, _ = given(PREDICTED, GPUS, believed=False)
    assert other.source == "traced"


def test_on_cpus_nothing_is_traced_unless_a_limit_was_given():
    assert given(PLAN, CPUS, trace=lambda: pytest.fail("traced")) == (None, [])
    found, _ = given(PLAN, CPUS, 2**30)
    assert found.worst in estimate_memory(NETWORK, None, PLAN, CPUS, memory_limit=2**30).stages


def test_a_kept_plan_that_was_made_within_the_same_limits_is_not_refused():
    found, _ = given(PREDICTED, CPUS, 2**31 - 1, refused=False)
    assert not found.is_likely


def test_what_does_not_fit_is_refused_with_what_would_help():
    with pytest.raises(InfeasibleError, match=r"(?s)the plan: Does not fit in 1.0 GiB .*Raise memory_limit, or let"):
        given(PREDICTED, CPUS, 2**30)
    with pytest.raises(InfeasibleError, match=r"would fit with pipeline_stages=2"):
        given(plan_of(4, world_size=2, global_batch_size=8), CPUS, 400 * 10**6)


def test_what_may_run_is_tried_on_all_of_a_device_and_not_beyond_a_limit():
    peak = round(0.99 * GPUS.device.memory_bytes)
    close = replace(PLAN, predicted=Predicted(step_seconds=1.0, stages=(STAGE, replace(STAGE, peak_bytes=peak))))
    found, _ = given(PREDICTED, GPUS)
    outside = found.worst.device_total.p50 - found.worst.reserved.p50
    fits = replace(close.predicted, stages=(STAGE, replace(STAGE, peak_bytes=peak - outside)))
    tight, _ = given(replace(close, predicted=fits), GPUS)
    assert tight.verdict == "tight"
    assert not tight.is_likely
    with pytest.raises(InfeasibleError, match="more likely than not it does not fit"):
        given(replace(close, predicted=fits), GPUS, GPUS.device.memory_bytes)
    with pytest.raises(InfeasibleError, match="the plan: Does not fit"):
        given(replace(close, predicted=replace(fits, stages=(STAGE, replace(STAGE, peak_bytes=2 * peak)))), GPUS)


def test_a_limit_that_cannot_be_checked_is_said():
    def fails():
        raise TraceError("the step reads a value")

    found, said = given(PLAN, CPUS, 2**30, trace=fails)
    assert found is None
    assert said == [
        "what the plan needs of memory is not known: the step reads a value",
        "memory_limit of 1.0 GiB is not checked: nothing predicts what it needs",
    ]
    assert given(PLAN, CPUS, 2**30, trace=None)[1] == said[1:]


def test_unlike_devices_have_limits_of_their_own():
    budget = Budget(cluster=parse_cluster("1xA100-40+1xL4"), asked=None)
    sizes = [part.device.memory_bytes for part in budget.cluster.parts]
    assert budget.limit == max(sizes)
    assert list(budget.limits(PLAN)) == [sizes[stage.devices[0]] for stage in PLAN.stages]
    assert budget.binds
    found, _ = given(PREDICTED, budget.cluster)
    assert [stage.limit for stage in found.stages] == list(budget.limits(PLAN))


def test_a_plan_that_needs_too_much_host_memory_is_refused():
    moved = replace(PLAN, stages=tuple(replace(stage, offload=OffloadRatios(optimizer=1.0)) for stage in PLAN.stages))

    def ask(host_asked):
        budget = Budget(cluster=CPUS, asked=None, host_asked=host_asked)
        return estimate_given(
            moved,
            NETWORK.module_map,
            budget,
            believed=True,
            refused=True,
            trace=lambda: NETWORK,
            say=lambda text: None,
        )

    needed = 2 * max(stage.host_bytes for stage in ask(2**40).stages)
    ask(needed)
    with pytest.raises(
        InfeasibleError, match=r"stage 0 needs .* of host memory for each of its devices .* raise host_memory_limit"
    ):
        ask(needed - 2)
