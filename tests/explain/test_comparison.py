from dataclasses import replace

import pytest

from lightning_mist.explain.baseline_plans import Baseline
from lightning_mist.explain.comparison import (
    OURS,
    closed_form_of,
    compare_plans,
    faster_notes,
    faster_plan,
    with_faster,
)
from lightning_mist.plan import Plan, Predicted, PredictedStage, StageMesh, StagePlan, StepWork
from lightning_mist.tuner.select.selection import TuneResult, TuneStats
from tests.tuner.plans import pipeline


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
        Baseline(name="alike", plan=plan(1.99)),
        Baseline(name="quick", plan=plan(1.9)),
        Baseline(name="as quick", plan=plan(1.9)),
        Baseline(name="chunks", plan=replace(plan(1.97), schedule="zb-h1")),
        Baseline(name="none", plan=None, reason="too large"),
    ]
    ours = plan(2.0)
    items = compare_plans(ours, others, outside=searched)
    quick, run, chunks, run_chunks = faster_notes(ours, items)
    assert quick.startswith("quick takes 5.0% less on the clock: by the closed form")
    assert run == "run the plan of quick instead: it is predicted to be 5.0% faster on the clock"
    assert chunks.startswith("chunks takes 1.5% less on the clock: zb-h1 is tried on some pipelines only")
    assert run_chunks.startswith("run the plan of chunks instead")
    assert faster_plan(items).name == "quick"


def test_what_was_not_searched_may_be_faster():
    ours, other = plan(2.0), plan(1.5)
    quicker = tuple(replace(stage, steady_seconds=0.7) for stage in other.predicted.stages)
    other = replace(other, predicted=replace(other.predicted, stages=quicker))
    items = compare_plans(ours, [Baseline(name="other", plan=other)], outside=lambda plan: ("ZeRO-3 on stage 0",))
    (note,) = faster_notes(ours, items)
    assert note == "other takes 25.0% less on the clock: it lies outside what was searched, with ZeRO-3 on stage 0"
    assert faster_plan(items) is None
    assert faster_plan(compare_plans(ours, [Baseline(name="other", plan=other)])) is None


def searched(plan):
    return ()


def test_what_lies_inside_is_never_said_to_lie_outside():
    """Fewer seconds by the closed form say nothing of where a plan lies."""
    ours, other = plan(2.0), plan(1.5)
    quicker = tuple(replace(stage, steady_seconds=0.7) for stage in other.predicted.stages)
    other = replace(other, predicted=replace(other.predicted, stages=quicker))
    note, run = faster_notes(ours, compare_plans(ours, [Baseline(name="other", plan=other)], outside=searched))
    assert "outside" not in note
    assert run.startswith("run the plan of other instead")


@pytest.mark.parametrize(("seconds", "is_taken"), [(1.999, False), (1.99, False), (1.97, True)])
def test_another_schedule_has_to_gain_more(seconds, is_taken):
    ours = plan(2.0)
    other = Baseline(name="other", plan=replace(plan(seconds), schedule="zb-h1"))
    assert (faster_plan(compare_plans(ours, [other], outside=searched)) is not None) == is_taken


def test_chunks_share_the_devices_of_their_group():
    chunks = pipeline(*[{"layers": 1}] * 4, groups=2, schedule="interleaved-1f1b", microbatches=4)
    stages = tuple(
        PredictedStage(
            steady_seconds=1.0, boundary_seconds=8.0, forward_seconds=0.3, backward_seconds=0.7, peak_bytes=1
        )
        for _ in chunks.stages
    )
    chunks = replace(chunks, predicted=Predicted(step_seconds=11.0, stages=stages))
    # Groups take 2 s of each of 4 microbatches, and 16 s once, which nothing hides for the first.
    assert closed_form_of(chunks) == 3 * 2.0 + 2 * 2.0 + 16.0


def test_a_faster_plan_takes_the_place_of_the_one_that_was_found():
    ours, quick = plan(2.0), plan(1.9)
    result = TuneResult(
        plan=ours,
        status="explored",
        bound=2.0,
        gap=0.0,
        closed_form_seconds=9.0,
        predicted=ours.predicted,
        alternatives=(),
        stats=TuneStats(seconds=1.0, candidates=1, pipelines=1, solved=1),
        notes=(),
    )
    (_, item) = compare_plans(ours, [Baseline(name="quick", plan=quick)], outside=searched)
    found = with_faster(result, item)
    assert (found.plan, found.predicted, found.status) == (quick, quick.predicted, "optimal")
    assert found.closed_form_seconds == closed_form_of(quick)
    assert found.alternatives[0].plan == ours
    assert found.notes[0].startswith("the plan is that of quick, which takes 5.0% less on the clock")
    refuted = with_faster(replace(result, bound=10.0), item)
    assert (refuted.status, refuted.bound, refuted.gap, refuted.certified) == ("explored", 0.0, 1.0, False)
    chunks = replace(item, plan=replace(quick, schedule="zb-h1"))
    assert (with_faster(result, chunks).status, with_faster(result, chunks).closed_form_seconds) == ("explored", 9.0)
