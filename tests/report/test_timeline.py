import dataclasses

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.report.timeline import Timeline, left_out, timeline_of, windows_of
from lightning_mist.schedule import simulate_plan
from tests.report.networks import predicted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"devices": 4, "zero_stage": 1},
        {"devices": 4, "zero_stage": 3, "checkpointed_layers": 2},
        {"schedule": "gpipe"},
        {"schedule": "zb-h1"},
        {"schedule": "interleaved-1f1b", "chunks": 2},
        {"kind": "cpu"},
    ],
    ids=str,
)
def test_lanes_are_what_the_clock_says(options):
    plan = predicted(2, 4, **options)
    simulation = simulate_plan(plan)
    timeline = timeline_of(plan, simulation)
    assert timeline.step_seconds == simulation.makespan
    assert len(timeline.lanes) == plan.num_groups
    for lane, busy in zip(timeline.lanes, simulation.busy, strict=True):
        assert lane.busy_seconds == pytest.approx(busy)
        for bar, behind in zip(lane.work[:-1], lane.work[1:], strict=True):
            assert bar.start < bar.end <= behind.start + 1e-12
    bubble = sum(simulation.bubble) / len(simulation.bubble) / simulation.makespan
    assert timeline.idle_share == pytest.approx(bubble)


def test_what_is_recomputed_comes_before_its_backward():
    plan = predicted(2, 4, checkpointed_layers=2)
    lane = timeline_of(plan).lanes[0]
    first = next(index for index, bar in enumerate(lane.work) if bar.kind == "recompute")
    assert (lane.work[first + 1].kind, lane.work[first + 1].microbatch) == ("backward", lane.work[first].microbatch)
    seconds = sum(bar.end - bar.start for bar in lane.work if bar.kind == "recompute")
    assert seconds == pytest.approx(4 * dict(plan.predicted.stages[0].breakdown)["recompute_seconds"])


def test_kinds_of_work():
    def kinds(**options):
        return {bar.kind for lane in timeline_of(predicted(2, 4, **options)).lanes for bar in lane.work}

    assert kinds() == {"forward", "backward", "optimizer"}
    assert kinds(devices=4) == {"forward", "backward", "optimizer", "collectives"}
    assert "copies" in kinds(devices=4, offload=_offload(optimizer=1.0))


def _offload(**ratios):
    from lightning_mist.plan import OffloadRatios

    return OffloadRatios(**ratios)


def test_later_chunks_are_told_apart():
    timeline = timeline_of(predicted(2, 4, schedule="interleaved-1f1b", chunks=2))
    assert [lane.label for lane in timeline.lanes] == ["stages 0, 2", "stages 1, 3"]
    assert {bar.chunk for bar in timeline.lanes[0].work} == {0, 1}


def test_few_microbatches_are_shown_whole():
    timeline = timeline_of(predicted(2, 4))
    assert windows_of(timeline) == ((0.0, timeline.step_seconds),)
    assert left_out(windows_of(timeline), 1.0) == ""


def test_of_many_microbatches_the_first_and_last_are_shown():
    timeline = timeline_of(predicted(2, 256))
    (start, first), (last, end) = windows_of(timeline)
    assert (start, end) == (0.0, timeline.step_seconds)
    starts = [bar.microbatch for bar in timeline.lanes[0].work if bar.end < first]
    ends = [bar.microbatch for bar in timeline.lanes[0].work if bar.start > last and bar.microbatch is not None]
    assert max(starts) < 12
    assert min(ends) > 242
    each = timeline.step_seconds / 257
    count = round((last - first) / each)
    assert left_out(((start, first), (last, end)), each).endswith(f"about {count} microbatches like those beside")


def test_points_that_must_be_shown_are():
    timeline = timeline_of(predicted(2, 256))
    middle = timeline.step_seconds / 2
    parts = windows_of(timeline, [middle])
    assert len(parts) == 3
    assert parts[1][0] < middle < parts[1][1]
    assert windows_of(timeline, [timeline.step_seconds]) == windows_of(timeline)


def test_a_step_that_takes_no_time_has_no_idle_share():
    assert Timeline(lanes=(), step_seconds=0.0, num_microbatches=1, schedule="1f1b").idle_share == 0.0


def test_a_plan_without_a_prediction_is_refused():
    with pytest.raises(PlanError, match="no predicted seconds"):
        timeline_of(dataclasses.replace(predicted(), predicted=None))


def test_a_plan_that_takes_no_time_has_nothing_to_draw():
    plan = predicted()
    empty = {"steady_seconds": 0.0, "boundary_seconds": 0.0, "forward_seconds": 0.0, "backward_seconds": 0.0}
    stages = tuple(dataclasses.replace(stage, **empty, breakdown=()) for stage in plan.predicted.stages)
    nothing = dataclasses.replace(plan.predicted, step_seconds=0.0, stages=stages)
    with pytest.raises(PlanError, match=r"predicted\.step_seconds = 0: nothing takes time"):
        timeline_of(dataclasses.replace(plan, predicted=nothing))
