import json
from dataclasses import replace

from rich.console import Console

from lightning_mist.plan import StepRates
from lightning_mist.strategy.monitoring.run_report import RunReport, StageReport
from lightning_mist.strategy.monitoring.stage_times import StageTimes


def make(predicted=2.0, stage_bytes=2**30):
    return RunReport(
        predicted_step_seconds=predicted,
        measured_step_seconds=2.5,
        spread_seconds=0.1,
        timed_steps=12,
        stages=(StageReport(predicted_bytes=stage_bytes, measured_bytes=2**31),),
        planning_seconds=3.0,
    )


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
