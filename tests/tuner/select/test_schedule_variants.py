import dataclasses

import pytest

from lightning_mist.cost import StageCostModel, least_seconds, predict, predict_with
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import OffloadRatios
from lightning_mist.schedule import check, lower
from lightning_mist.tuner.select import schedule_variants
from lightning_mist.tuner.select.schedule_variants import PlanRoom, _recomputing, _variants, best_variant
from lightning_mist.tuner.space.applied_space import SearchSpace, apply
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline
from tests.tuner.test_tuning import search

FAST = profile(link=1e12, latency=0.0)
NETWORK = spec(8, parameter_bytes=4000, edge_bytes=4000, measured=True)
ALL = ("1f1b", "interleaved-1f1b", "zb-h1")


def plenty(plan):
    return (1e12,) * plan.num_stages


def found(schedules, *, memory=10**12, machine=FAST, network=NETWORK, **limits):
    """Two devices; one stage each, and few microbatches, so that bubbles are large."""
    limits = {"num_stages": (2,), "num_microbatches": (2,), "zero_stages": (0,), **limits}
    return search(network, rows=2, memory=memory, machine=machine, schedules=schedules, **limits)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-h1"])
def test_another_schedule_wins_where_bubbles_are_large(schedule):
    plain, other = found(("1f1b",)), found(("1f1b", schedule))
    if schedule == "zb-h1":
        # Nothing is put off where nothing is said to be linear.
        assert other.plan.schedule == "1f1b"
        linear = [dataclasses.replace(kind, weight_flops=kind.forward_flops) for kind in NETWORK.layers]
        other = found(("1f1b", schedule), network=dataclasses.replace(NETWORK, layers=tuple(linear)))
    assert other.plan.schedule == schedule
    assert other.status == "explored"
    assert other.gap == 0.0
    assert other.predicted.step_seconds < 0.99 * plain.predicted.step_seconds
    assert other.bound == pytest.approx(plain.bound)
    check(lower(other.plan, tied=False), other.plan.num_microbatches)
    assert f"{schedule} gains on the pipelines that it was tried on" in other.explain()[0]
    assert any(item.name == "1f1b" and item.plan.schedule == "1f1b" for item in other.alternatives)


def test_the_prediction_is_that_of_the_plan():
    plan = found(ALL).plan
    assert plan.predicted == predict(NETWORK, FAST, cluster(2), plan)


def test_chunks_keep_the_devices_and_layers_of_their_stage():
    plain, plan = found(("1f1b",)).plan, found(("1f1b", "interleaved-1f1b")).plan
    assert plan.num_groups == plain.num_stages
    for group, stage in enumerate(plain.stages):
        chunks = [plan.stages[index] for index in plan.chunks(group)]
        assert {chunk.devices for chunk in chunks} == {stage.devices}
        assert sum(chunk.num_layers for chunk in chunks) == stage.num_layers


def test_what_does_not_fit_recomputes_more():
    wide = spec(8, widths=(10_000,), parameter_bytes=4000, edge_bytes=4000, measured=True)
    roomy = found(("1f1b", "interleaved-1f1b"), network=wide)
    assert roomy.plan.schedule == "interleaved-1f1b"
    peak = max(stage.peak_bytes for stage in roomy.predicted.stages)
    tight = found(("interleaved-1f1b",), network=wide, memory=peak * 3 // 5).plan
    assert tight.schedule == "interleaved-1f1b"
    assert sum(stage.checkpointing.layers for stage in tight.stages) > 0
    assert max(stage.peak_bytes for stage in tight.predicted.stages) < peak


def test_no_gain_is_told():
    # On slow links every further chunk costs more than the bubble that it saves.
    slow = profile(link=1e6, latency=1e-3)
    result = found(("1f1b", "interleaved-1f1b"), machine=slow)
    assert result.plan.schedule == "1f1b"
    assert "no pipeline that was tried gains 1% under interleaved-1f1b" in result.notes


def test_without_1f1b_only_what_was_asked_for_is_chosen():
    assert found(("interleaved-1f1b",)).plan.schedule == "interleaved-1f1b"
    with pytest.raises(InfeasibleError, match=r"schedules=\['interleaved-1f1b'\].*Add '1f1b' to schedules"):
        found(("interleaved-1f1b",), num_stages=(1,))


def test_sharded_gradients_stay_with_1f1b():
    space = apply(SearchSpace(schedules=("1f1b", "zb-h1")), NETWORK, 2, 4)
    model = StageCostModel(NETWORK, FAST, cluster(2))
    plan = found(("1f1b",)).plan
    stages = tuple(dataclasses.replace(stage, zero_stage=2) for stage in plan.stages)
    assert best_variant(PlanRoom(model, space, plenty, plenty), [plan]).schedule == "zb-h1"
    sharded = dataclasses.replace(plan, stages=stages, predicted=None)
    assert best_variant(PlanRoom(model, space, plenty, plenty), [sharded]) is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-h1"])
@pytest.mark.parametrize("latency", [1e-5, 1e-2])
@pytest.mark.parametrize("moved", [{}, {"optimizer": 1.0}, {"parameters": 1.0, "gradients": 0.5, "activations": 0.5}])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_devices_compute_is_never_more_than_the_step(kind, schedule, latency, moved, zero):
    stages = [{"layers": 4, "data": 2, "offload": moved, "zero": zero}] * 2
    space = apply(SearchSpace(schedules=(schedule,)), NETWORK, 4, 4)
    copies = {"host_to_device_bytes_per_second": 1e6, "device_to_host_bytes_per_second": 2e6}
    machine = dataclasses.replace(profile(link=1e6, latency=latency), **copies)
    model = StageCostModel(NETWORK, machine, cluster(4, kind=kind))
    candidates = list(_variants(pipeline(*stages, microbatches=2), space))
    assert candidates or (schedule, zero) == ("zb-h1", 3)
    for plan in candidates:
        assert 0 < least_seconds(model, [plan])[0] <= predict_with(model, plan).step_seconds


@pytest.mark.parametrize("pin", [{"layer_cuts": (5,)}, {"checkpointed_shares": (0.0, 1.0)}])
def test_settled_layers_and_recomputation_stay_as_they_are(pin):
    plan = found(ALL, **pin).plan
    assert plan.num_stages == 2
    assert found(ALL).plan.num_stages > 2
    if "layer_cuts" in pin:
        assert plan.bounds == ((0, 5), (5, 8))
    for stage in plan.stages:
        assert "layer_cuts" in pin or stage.checkpointing.layers in (0, stage.num_layers)


def test_settled_recomputation_is_not_added_to():
    plan, model = found(("1f1b",)).plan, StageCostModel(NETWORK, FAST, cluster(2))
    other = dataclasses.replace(plan, schedule="zb-h1", predicted=None)
    least = [memory.peak_bytes for memory in plan_memory(model.memory, other)]
    recomputed = [
        memory.peak_bytes
        for memory in plan_memory(model.memory, _recomputing(other, max(stage.num_layers for stage in plan.stages)))
    ]
    assert max(recomputed) < max(least)
    tight = lambda item: (max(least) - 1,) * item.num_stages  # noqa: E731
    for shares, fits in ((None, True), ((0.0, 1.0), False)):
        space = apply(SearchSpace(schedules=("zb-h1",), checkpointed_shares=shares), NETWORK, 2, 4)
        assert (best_variant(PlanRoom(model, space, tight, plenty), [plan]) is not None) == fits


def test_host_memory_limits_other_schedules_too():
    plan, model = found(("1f1b",), num_microbatches=(4,)).plan, StageCostModel(NETWORK, FAST, cluster(2))
    moved = OffloadRatios(activations=1.0)
    plan = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, offload=moved) for stage in plan.stages), predicted=None
    )
    space = apply(SearchSpace(schedules=("interleaved-1f1b",), checkpointing=False), NETWORK, 2, 4)
    chosen = best_variant(PlanRoom(model, space, plenty, plenty), [plan])
    assert chosen is not None
    held = [max(memory.host_bytes for memory in plan_memory(model.memory, item)) for item in (plan, chosen)]
    assert 0 < held[0] < held[1]
    between = lambda item: (held[0],) * item.num_stages  # noqa: E731
    assert best_variant(PlanRoom(model, space, plenty, between), [plan]) is None


def test_what_does_not_fit_on_its_last_stage_is_not_looked_at_as_a_whole(monkeypatch):
    plan, model = found(("1f1b",)).plan, StageCostModel(NETWORK, FAST, cluster(2))
    space = apply(SearchSpace(schedules=("zb-h1",)), NETWORK, 2, 4)
    asked, real = [], schedule_variants.plans_peaks
    monkeypatch.setattr(
        schedule_variants, "plans_peaks", lambda model, items: asked.extend(items) or real(model, items)
    )
    none = lambda item: (1.0,) * item.num_stages  # noqa: E731
    assert best_variant(PlanRoom(model, space, none, plenty), [plan]) is None
    assert asked == []
    assert best_variant(PlanRoom(model, space, plenty, plenty), [plan]) is not None
    assert [item.schedule for item, _ in asked] == ["zb-h1"]


def test_what_is_slower_in_any_case_is_not_run(monkeypatch):
    plan, model = found(("1f1b",)).plan, StageCostModel(NETWORK, FAST, cluster(2))
    space = apply(SearchSpace(schedules=("zb-h1",)), NETWORK, 2, 4)
    asked, real = [], schedule_variants.seconds_with
    noted = lambda model, item: asked.append(item) or real(model, item)  # noqa: E731
    monkeypatch.setattr(schedule_variants, "seconds_with", noted)
    (floor,) = least_seconds(model, [dataclasses.replace(plan, schedule="zb-h1")])
    assert best_variant(PlanRoom(model, space, plenty, plenty), [plan], below=floor) is None
    assert asked == []
    assert best_variant(PlanRoom(model, space, plenty, plenty), [plan]) is not None
    assert asked


def test_where_the_fastest_fits_as_it_is_no_other_has_to(monkeypatch):
    plan, model = found(("1f1b",), num_microbatches=(4,)).plan, StageCostModel(NETWORK, FAST, cluster(2))
    space = apply(SearchSpace(schedules=("interleaved-1f1b",)), NETWORK, 2, 4)
    assert len(list(_variants(plan, space))) > 1
    asked, real = [], schedule_variants.plans_peaks
    monkeypatch.setattr(
        schedule_variants, "plans_peaks", lambda model, items: asked.extend(items) or real(model, items)
    )
    chosen = best_variant(PlanRoom(model, space, plenty, plenty), [plan])
    assert [item for item, _ in asked] == [dataclasses.replace(chosen, predicted=None)]
    assert chosen.predicted.step_seconds == min(
        predict_with(model, item).step_seconds for item in _variants(plan, space)
    )
