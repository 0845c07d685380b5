import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from lightning_mist.cost import predict
from lightning_mist.plan import StepRates
from lightning_mist.runtime.recording import Recorded
from lightning_mist.schedule import Action
from lightning_mist.strategy.run_report import (
    Measured,
    RunReport,
    StageReport,
    StageTimes,
    over_stages,
    over_steps,
    predicted_times,
    step_times,
)
from tests.cost.memory.test_memory_model import make_plan
from tests.specs import cluster, profile, spec


def make(predicted=2.0, stage_bytes=2**30):
    return RunReport(
        predicted_step_seconds=predicted,
        measured_step_seconds=2.5,
        spread_seconds=0.1,
        timed_steps=12,
        stages=(StageReport(predicted_bytes=stage_bytes, measured_bytes=2**31),),
        planning_seconds=3.0,
    )


def stages_on(*devices, groups=1):
    """A plan, as far as its ranks are asked for."""
    return SimpleNamespace(stages=[SimpleNamespace(devices=of_one) for of_one in devices], num_groups=groups)


def text(report):
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.capture() as capture:
        console.print(report.table())
    console.file.close()
    return capture.get()


def test_table_compares():
    shown = text(make())
    assert "2 s" in shown
    assert "-20.0%" in shown
    assert "2.0 GiB" in shown
    assert "-50.0%" in shown


def test_rates_are_compared():
    def rates(seconds, **known):
        return StepRates(step_seconds=seconds, rows_per_second=8 / seconds, **known)

    known = {"tokens_per_second": 4000.0, "flops_per_second": 1e12, "utilisation": 0.4, "roofline_ratio": 2.0}
    slower = {"tokens_per_second": 3200.0, "flops_per_second": 8e11, "utilisation": 0.32, "roofline_ratio": 2.5}
    report = replace(make(), predicted_rates=rates(2.0, **known), measured_rates=rates(2.5, **slower))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text(report).splitlines() if "│" in line]
    assert ["rows/s", "4", "3.2", "+25.0%"] in rows
    assert ["tokens/s", "4,000", "3,200", "+25.0%"] in rows
    assert ["model FLOPs utilisation", "40.0%", "32.0%", "+25.0%"] in rows
    assert ["times the roofline", "2", "2.5", "-20.0%"] in rows
    assert json.loads(report.to_json())["measured_rates"]["tokens_per_second"] == 3200.0
    bare = text(replace(report, predicted_rates=None, measured_rates=rates(2.5)))
    assert "rows/s" in bare
    assert "tokens/s" not in bare


def test_without_prediction_it_says_so():
    assert "not predicted" in text(make(predicted=None, stage_bytes=None))


def test_json_has_every_figure():
    data = json.loads(make().to_json())
    assert data["measured_step_seconds"] == 2.5
    assert data["stages"][0]["predicted_bytes"] == 2**30
    assert data["stages"][0]["measured_bytes"] == 2**31


def test_on_a_device_the_allocator_is_compared_too():
    stage = StageReport(
        predicted_bytes=2**30,
        measured_bytes=2**30,
        predicted_reserved_bytes=3 * 2**30,
        measured_reserved_bytes=4 * 2**30,
        predicted_device_bytes=5 * 2**30,
        measured_device_bytes=4 * 2**30,
    )
    shown = text(replace(make(), stages=(stage,)))
    assert "reserved, stage 0" in shown
    assert "-25.0%" in shown
    assert "device total, stage 0" in shown
    assert "+25.0%" in shown
    assert "reserved" not in text(make())


def test_seconds_of_stages_are_shown_where_they_were_measured():
    predicted = StageTimes(forward_seconds=0.5, backward_seconds=1.0, waiting_seconds=0.25, optimizer_seconds=0.125)
    measured = StageTimes(forward_seconds=0.625, backward_seconds=1.0, waiting_seconds=0.25, other_seconds=0.5)
    stage = replace(make().stages[0], predicted_times=predicted, measured_times=measured)
    report = replace(make(), stages=(stage, make().stages[0]))
    lines = text(report).splitlines()
    assert any("0 predicted" in line and "500 ms" in line for line in lines)
    assert any("0 measured" in line and "625 ms" in line for line in lines)
    (heading,) = (line for line in lines if "waiting" in line)
    assert "reduction" not in heading
    assert "other" in heading
    assert not any("1 measured" in line for line in lines)
    assert json.loads(report.to_json())["stages"][0]["measured_times"]["forward_seconds"] == 0.625
    assert "Where the seconds" not in text(make())


def recorded(*items):
    return [
        Recorded(
            action=Action.parse(text) if text[0].isdigit() else text,
            seconds=seconds,
            waited_seconds=waited,
        )
        for text, seconds, waited in items
    ]


def test_actions_fall_to_what_they_belong_to():
    found = step_times(
        recorded(
            ("1RECV_F0", 1, 0),
            ("1F0", 10, 4),
            ("1SEND_F0", 1, 0),
            ("1RECV_B0", 2, 0),
            ("1I0", 30, 10),
            ("1W0", 5, 0),
            ("1SEND_B0", 2, 0),
            ("1REDUCE", 7, 6),
            ("1REDUCE_TIED", 5, 3),
            ("1STEP", 0, 0),
            ("sends", 1, 1),
            ("closure", 70, 0),
            ("step", 90, 0),
        ),
        1,
    )
    assert found == {
        1: StageTimes(
            forward_seconds=8,
            backward_seconds=29,
            waiting_seconds=4 + 10 + 3 + 1,
            reduction_seconds=7 + 2,
            optimizer_seconds=20,
            other_seconds=90 - 8 - 29 - 18 - 9 - 20,
        )
    }
    assert found[1].total == 90


def test_chunks_are_told_apart_and_what_they_share_is_with_the_first():
    found = step_times(recorded(("0F0", 2, 1), ("2F0", 5, 2), ("2B0", 7, 0), ("closure", 15, 0), ("step", 18, 0)), 0)
    assert found[0] == StageTimes(
        forward_seconds=1, waiting_seconds=3, optimizer_seconds=3, other_seconds=18 - 1 - 3 - 3 - 3 - 7
    )
    assert found[2] == StageTimes(forward_seconds=3, backward_seconds=7)


def test_without_a_schedule_backward_is_what_follows_the_forward():
    found = step_times(recorded(("forward", 3, 0), ("closure", 10, 0), ("step", 12, 0)), 0)
    assert found == {0: StageTimes(forward_seconds=3, backward_seconds=7, optimizer_seconds=2)}


def test_what_the_last_backward_takes_longer_is_the_reduction_beside_it():
    items = recorded(
        *(("0B0", 4, 1), ("0B1", 5, 1), ("0B2", 4, 1), ("0B3", 9, 2)),
        ("0REDUCE", 1, 1),
        ("closure", 24, 0),
        ("step", 24, 0),
    )
    plain, beside = (step_times(items, 0, overlaps=overlaps)[0] for overlaps in (False, True))
    assert (plain.backward_seconds, plain.reduction_seconds) == (3 + 4 + 3 + 7, 1)
    assert (beside.backward_seconds, beside.reduction_seconds) == (3 + 4 + 3 + 3, 5)
    assert beside.total == plain.total
    alone = recorded(("0B0", 4, 1), ("closure", 4, 0), ("step", 4, 0))
    assert step_times(alone, 0, overlaps=True) == step_times(alone, 0)


def test_a_module_that_steps_by_itself_is_not_taken_apart():
    assert step_times(recorded(("closure", 1, 0), ("step", 12, 0)), 0) == {}


def test_who_comes_last_to_an_exchange_tells_what_it_takes():
    found = step_times(
        recorded(("exchange", 2, 1), ("results", 3, 3), ("0F0", 4, 0), ("closure", 9, 0), ("step", 9, 0)), 0
    )
    assert found == {0: StageTimes(forward_seconds=4, exchange_seconds=5)}
    late = Measured(times=StageTimes(exchange_seconds=2, waiting_seconds=1), steps=1)
    early = replace(late, times=StageTimes(exchange_seconds=5, other_seconds=1))
    chunk = replace(late, times=StageTimes(forward_seconds=1))
    first, second, third = over_stages(stages_on((0,), (1,), (2,), groups=2), [{0: late}, {1: early}, {2: chunk}])
    assert first.times == StageTimes(waiting_seconds=1, other_seconds=2)
    assert second.times == StageTimes(waiting_seconds=3, other_seconds=3)
    assert third == chunk
    assert over_stages(stages_on((0,)), [{}]) == (None,)


def test_medians_over_steps_and_means_over_ranks():
    steps = [{3: StageTimes(forward_seconds=seconds, other_seconds=1.0)} for seconds in (1.0, 2.0, 9.0)]
    (stage,) = over_steps(steps).values()
    assert stage.times == StageTimes(forward_seconds=2.0, other_seconds=1.0)
    other = replace(stage, times=StageTimes(forward_seconds=4.0), steps=2)
    (both,) = over_stages(stages_on((0, 1)), [{0: stage}, {0: other}])
    assert both.times == StageTimes(forward_seconds=3.0, other_seconds=0.5)
    assert both.steps == 2
    assert over_steps([]) == over_steps([{}]) == {}


def planned(*args, **kwargs):
    plan = make_plan(*args, **kwargs)
    return replace(plan, predicted=predict(spec(6, measured=True), profile(), cluster(plan.world_size), plan))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_predicted_seconds_of_a_stage_fill_the_step(zero):
    plan = planned([2, 4], degree=2, microbatches=4, rows=2, zero=zero, checkpointed=1)
    found = predicted_times(plan)
    assert len(found) == 2
    for times, stage in zip(found, plan.predicted.stages, strict=True):
        terms = dict(stage.breakdown)
        assert times.total == pytest.approx(plan.predicted.step_seconds)
        computed = 4 * (stage.forward_seconds + stage.backward_seconds) - terms["accumulate_seconds"]
        units = 4 * (terms["unshard_seconds"] + terms["scatter_seconds"])
        assert times.forward_seconds + times.backward_seconds == pytest.approx(computed + units)
        assert times.optimizer_seconds == pytest.approx(terms["update_seconds"] + terms["gather_seconds"])
        assert times.waiting_seconds > 0


def test_nothing_is_predicted_of_a_plan_without_terms():
    plan = planned([2, 4])
    assert predicted_times(replace(plan, predicted=None)) == ()
    bare = tuple(replace(stage, breakdown=()) for stage in plan.predicted.stages)
    assert predicted_times(replace(plan, predicted=replace(plan.predicted, stages=bare))) == ()


def test_steps_that_a_module_took_by_itself_are_left_out():
    times = StageTimes(forward_seconds=1.0)
    assert over_steps([{0: times}, {}, {0: times}])[0].steps == 2
    assert over_steps([{}, {0: times}])[0].times == times
    assert over_steps([{}]) == {}
