from dataclasses import replace

import pytest

from lightning_mist.plan import Plan, Predicted, PredictedStage, StageMesh, StagePlan, StepWork
from lightning_mist.tuner.baselines import Baseline
from lightning_mist.tuner.comparison import OURS, compare_plans, faster_notes


def plan(seconds, *, microbatches=2, tokens=None):
    work = StepWork(
        model_flops=1e9, peak_flops_per_second=0.0, peak_source="", roofline_seconds=0.0, sequence_length=tokens
    )
    stages = tuple(
        StagePlan(layers=edge, mesh=StageMesh(devices=(rank,)), microbatch_size=8 // microbatches)
        for edge, rank in (((0, 2), 1), ((2, 4), 0))
    )
    shown = tuple(
        PredictedStage(
            steady_seconds=1.0, boundary_seconds=0.0, forward_seconds=0.3, backward_seconds=0.7, peak_bytes=peak
        )
        for peak in (3000, 2000)
    )
    return Plan(
        global_batch_size=8,
        num_microbatches=microbatches,
        stages=stages,
        predicted=Predicted(step_seconds=seconds, stages=shown, work=work),
    )


def test_figures():
    others = [Baseline(name="slow", plan=plan(4.0, tokens=16)), Baseline(name="none", plan=None, reason="too large")]
    ours, slow, none = compare_plans(plan(2.0, microbatches=4), others)
    assert (ours.name, ours.step_seconds, ours.ratio, ours.rows_per_second) == (OURS, 2.0, 1.0, 4.0)
    assert (ours.tokens_per_second, ours.peak_bytes) == (None, 3000)
    assert ours.settings == "2 stages; 4 microbatches of 2 rows"
    assert (slow.name, slow.ratio, slow.rows_per_second, slow.tokens_per_second) == ("slow", 2.0, 2.0, 32.0)
    assert slow.plan == others[0].plan
    assert (none.plan, none.reason, none.ratio, none.step_seconds) == (None, "too large", None, None)


def test_a_plan_without_a_prediction_cannot_be_compared():
    with pytest.raises(ValueError, match="only plans whose seconds are predicted"):
        compare_plans(replace(plan(1.0), predicted=None), [])


def test_what_is_faster_is_explained():
    others = [
        Baseline(name="slow", plan=plan(2.1)),
        Baseline(name="alike", plan=plan(1.9999)),
        Baseline(name="quick", plan=plan(1.9)),
        Baseline(name="as quick", plan=plan(1.9)),
        Baseline(name="chunks", plan=replace(plan(1.99), schedule="zb-h1")),
        Baseline(name="none", plan=None, reason="too large"),
    ]
    ours = plan(2.0)
    quick, chunks = faster_notes(ours, compare_plans(ours, others))
    assert quick.startswith("quick takes 5.0% less on the clock: by the closed form")
    assert chunks.startswith("chunks takes 0.5% less on the clock: a plan under zb-h1 is chosen where it gains 1%")


def test_what_was_not_searched_may_be_faster():
    ours, other = plan(2.0), plan(1.5)
    quicker = tuple(replace(stage, steady_seconds=0.7) for stage in other.predicted.stages)
    other = replace(other, predicted=replace(other.predicted, stages=quicker))
    (note,) = faster_notes(ours, compare_plans(ours, [Baseline(name="other", plan=other)]))
    assert note == "other takes 25.0% less on the clock: it lies outside what was searched"
