import dataclasses

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.report.timeline import Timeline, left_out, timeline_of, windows_of
from lightning_mist.schedule import simulate_plan
from tests.report.networks import predicted, rows_of, with_channels


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


def _busy(lane, timeline, kind):
    bars = lane.channels((0.0, timeline.step_seconds))
    return sum(bar.end - bar.start for bar in bars if bar.kind == kind)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1},
        {"stages": 2},
        {"stages": 2, "schedule": "zb-h1"},
        {"stages": 2, "schedule": "interleaved-1f1b", "chunks": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", [("activations",), ("optimizer",), ("parameters", "gradients", "optimizer")])
def test_copies_take_what_their_units_do_beside_the_work(options, kinds):
    plan = with_channels(**options, offload=_offload(**dict.fromkeys(kinds, 1.0)))
    timeline = timeline_of(plan)
    assert timeline.channels
    for group, lane in enumerate(timeline.lanes):
        for column, kind in ((3, "from host"), (4, "to host")):
            wanted = 0.0
            for chunk in plan.chunks(group):
                stage = plan.predicted.stages[chunk]
                is_deferred = any(name == "channels.first forward" for name, _ in stage.units)
                # The first backward is shorter: it adds to no gradients.
                whole = sum(row[0] * row[1] for row in rows_of(stage, "backward"))
                shorter = dict(stage.breakdown)["accumulate_seconds"] / whole if whole else 0.0
                times = {"first forward": is_deferred, "forward": 4 - is_deferred, "backward": 4 - shorter}
                wanted += sum(
                    count * row[0] * row[column] for name, count in times.items() for row in rows_of(stage, name)
                )
            if options.get("schedule") != "zb-h1":  # whose input gradients take less than a backward
                assert _busy(lane, timeline, kind) == pytest.approx(wanted, rel=1e-6)
        for bar in lane.channels((0.0, timeline.step_seconds)):
            middle = (bar.start + bar.end) / 2
            assert any(work.start <= middle <= work.end for work in lane.work)


def test_an_update_goes_on_in_the_first_forward():
    plan = with_channels(1, offload=_offload(optimizer=1.0))
    timeline = timeline_of(plan)
    (lane,) = timeline.lanes
    late, step = (bar.start for bar in lane.work if bar.kind == "optimizer")
    assert late == 0.0
    first = next(bar.end for bar in lane.work if bar.kind == "forward")
    times = [(bar.start, bar.end) for bar in lane.channels((0.0, timeline.step_seconds)) if bar.kind == "from host"]
    behind = [start for start, _ in times if start >= step - 1e-12]
    ahead = [end for _, end in times if end <= first + 1e-12]
    assert len(behind) + len(ahead) == len(times)
    assert behind
    assert ahead


def test_averaging_begins_in_the_last_backward():
    plan = with_channels(2, devices=4)
    hidden = (("channels.reduce", (1e-4,)),)
    predicted = plan.predicted
    stages = tuple(dataclasses.replace(stage, units=hidden) for stage in predicted.stages)
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(predicted, stages=stages))
    timeline = timeline_of(plan)
    for lane in timeline.lanes:
        (bar,) = lane.channels((0.0, timeline.step_seconds))
        reduce = next(bar for bar in lane.work if bar.kind == "collectives")
        assert (bar.kind, bar.start, bar.end) == ("network", pytest.approx(reduce.start - 1e-4), reduce.end)


def test_collectives_of_units_are_beside_forwards_and_backwards():
    plan = with_channels(2, devices=4, zero_stage=3)
    timeline = timeline_of(plan)
    assert timeline.channels == ("network",)
    for lane, stage in zip(timeline.lanes, plan.predicted.stages, strict=True):
        kinds = {
            work.kind
            for bar in lane.channels((0.0, timeline.step_seconds))
            for work in lane.work
            if work.start < (bar.start + bar.end) / 2 < work.end
        }
        assert {"forward", "backward"} <= kinds
        assert rows_of(stage, "forward")


def test_of_other_predictions_no_channels_are_known():
    timeline = timeline_of(predicted(2, 4, devices=4, zero_stage=3))
    assert timeline.channels == ()
    assert all(lane.channels((0.0, timeline.step_seconds)) == [] for lane in timeline.lanes)


def test_only_a_part_of_the_step_is_asked_for():
    plan = with_channels(1, 16, offload=_offload(activations=1.0))
    timeline = timeline_of(plan)
    window = (0.25 * timeline.step_seconds, 0.5 * timeline.step_seconds)
    every, some = (timeline.lanes[0].channels(part) for part in ((0.0, timeline.step_seconds), window))
    assert some == [bar for bar in every if bar.end > window[0] and bar.start < window[1]]
    assert 0 < len(some) < len(every)
