import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lightning_mist.strategy.monitor as monitor_module
from lightning_mist.estimate import Interval, MemoryEstimate, StageEstimate
from lightning_mist.hardware import Correction
from lightning_mist.plan import ModuleMap, Predicted, PredictedStage
from lightning_mist.strategy.monitor import Monitor
from lightning_mist.strategy.planning.decision import Decision
from lightning_mist.strategy.run_report import StageTimes
from lightning_mist.tensors import batch_signature
from tests.plans import plan_of

FLOATS = 1000


def make(tmp_path):
    predicted = PredictedStage(
        steady_seconds=1.0, boundary_seconds=0.0, forward_seconds=0.5, backward_seconds=0.5, peak_bytes=5000
    )
    plan = plan_of(1, 1, {"layers": 0}, predicted=Predicted(step_seconds=1.0, stages=(predicted,)))
    empty = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=())
    decision = Decision(plan=plan, module_map=empty, has_unused_parameters=False, planning_seconds=2.0, plan_path=None)
    module = nn.Linear(FLOATS, 1, bias=False)
    path = tmp_path / "out" / "report.json"
    return Monitor(decision, device=torch.device("cpu"), module=module, report_path=str(path)), module, path


def step():
    temporary = torch.ones(2 * FLOATS)
    del temporary


def run(monitor, module, steps):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        with monitor.step(optimizer, step) as closure:
            closure()


@pytest.mark.usefixtures("single_rank")
def test_a_report_that_cannot_be_written_is_said_and_costs_nothing(tmp_path, capsys):
    monitor, module, path = make(tmp_path)
    path.parent.write_text("a file where the folder would be")
    run(monitor, module, 5)
    monitor.finish()
    assert monitor.report.timed_steps == 3
    assert f"the report is not written to {path}: " in capsys.readouterr().err


@pytest.mark.usefixtures("single_rank")
def test_the_second_step_is_metered_and_later_ones_are_timed(tmp_path, capsys):
    monitor, module, path = make(tmp_path)
    run(monitor, module, 5)
    assert monitor.report is None
    monitor.finish()
    report = monitor.report
    assert report.timed_steps == 3
    assert report.stages[0].measured_bytes == 3 * FLOATS * 4
    assert report.stages[0].predicted_bytes == 5000
    assert (report.predicted_step_seconds, report.planning_seconds) == (1.0, 2.0)
    assert report.measured_step_seconds > 0
    assert report.predicted_rates.rows_per_second == 1.0
    assert report.measured_rates.rows_per_second == pytest.approx(1 / report.measured_step_seconds)
    assert json.loads(path.read_text())["timed_steps"] == 3
    assert "Predicted against measured" in capsys.readouterr().err


@pytest.mark.usefixtures("single_rank")
def test_a_first_comparison_comes_while_training(tmp_path, capsys):
    monitor, module, _ = make(tmp_path)
    run(monitor, module, 12)
    assert monitor.report.timed_steps == 10
    assert "median of 10" in capsys.readouterr().err


@pytest.mark.usefixtures("single_rank")
def test_a_short_run_says_that_nothing_was_compared(tmp_path, capsys):
    monitor, module, path = make(tmp_path)
    run(monitor, module, 2)
    monitor.finish()
    assert monitor.report is None
    assert not path.exists()
    assert "too few optimizer steps" in capsys.readouterr().err


@pytest.mark.usefixtures("single_rank")
def test_an_estimate_is_what_is_compared(tmp_path):
    monitor, module, _ = make(tmp_path)
    size = Interval(p50=7000, p95=8000)
    stage = StageEstimate(
        stage=0, devices=(0,), phase="backward", allocated=size, reserved=size, device_total=size, terms=()
    )
    plan = monitor.decision.plan
    estimate = MemoryEstimate(
        model="", cluster="", memory_limit=1, plan=plan, precision="", optimizer="", stages=(stage,)
    )
    monitor.decision = replace(monitor.decision, estimate=estimate)
    run(monitor, module, 4)
    monitor.finish()
    (found,) = monitor.report.stages
    assert (found.predicted_bytes, found.measured_bytes) == (7000, 3 * FLOATS * 4)
    assert found.measured_reserved_bytes is found.predicted_device_bytes is None


@pytest.mark.usefixtures("single_rank")
def test_where_seconds_go_is_recorded_in_the_first_timed_steps_only(tmp_path, monkeypatch):
    monitor, module, _ = make(tmp_path)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lightning_mist.devices.ops.perf_counter", lambda: clock.now)
    optimizer, recording = torch.optim.SGD(module.parameters(), lr=0.1), []

    def closure():
        recording.append(monitor.recorder.is_on)
        with monitor.recorder.phase("forward"):
            clock.now += 1.0
        clock.now += 2.0
        return "loss"

    for _ in range(15):
        with monitor.step(optimizer, closure) as timed:
            assert timed() == "loss"
            clock.now += 4.0
    monitor.finish()
    assert recording == [False] * 2 + [True] * 10 + [False] * 3
    (stage,) = monitor.report.stages
    assert stage.measured_times == StageTimes(forward_seconds=1.0, backward_seconds=2.0, optimizer_seconds=4.0)
    assert stage.predicted_times is None
    assert monitor.report.timed_steps == 13
    assert monitor.measured[0].steps == 10


@pytest.mark.usefixtures("single_rank")
def test_what_was_learned_is_in_the_report(tmp_path, capsys):
    monitor, module, path = make(tmp_path)
    learned = Correction(term="forward", factor=1.5, ratios=(1.5, 1.5))
    calls = []

    class FakeLearner:
        basis = SimpleNamespace(corrections=())

        def learn(self, measured):
            calls.append(len(measured))
            self.basis = SimpleNamespace(corrections=(learned,))

    monitor._learner = FakeLearner()
    run(monitor, module, 14)
    assert calls == [1]
    assert monitor.report.corrections == (learned,)
    assert "forward, later plans" in " ".join(capsys.readouterr().err.split())
    monitor.finish()
    written = json.loads(path.read_text())
    assert written["corrections"] == [{"term": "forward", "factor": 1.5, "ratios": [1.5, 1.5]}]


@pytest.mark.usefixtures("single_rank")
def test_without_a_basis_nothing_is_learned(tmp_path):
    monitor, module, _ = make(tmp_path)
    assert monitor._learner is None
    run(monitor, module, 14)
    assert monitor.report.corrections == ()


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(("rows", "lessons"), [(3, 1), (2, 0)])
def test_batches_of_another_shape_teach_nothing(tmp_path, rows, lessons):
    monitor, module, _ = make(tmp_path)
    monitor.decision = replace(monitor.decision, signature=batch_signature(torch.zeros(3, 4)))
    taught = []
    monitor._learner = SimpleNamespace(learn=taught.append, basis=SimpleNamespace(corrections=()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for index in range(14):
        with monitor.step(optimizer, step) as closure:
            # What comes before and after recording does not matter.
            monitor.saw(torch.zeros(rows if index == 7 else 3 if 2 <= index < 12 else 1, 4))
            closure()
    assert len(taught) == lessons


@pytest.mark.usefixtures("single_rank")
def test_a_device_is_waited_for_and_compared_in_the_first_timed_steps_only(tmp_path, monkeypatch, capsys):
    monitor, module, _ = make(tmp_path)
    run(monitor, module, 2)  # what they measure, they measure on a real device
    waited, compared, compare = [], [], monitor._compare
    monkeypatch.setattr(monitor_module, "ops_of", lambda _: SimpleNamespace(synchronize=lambda: waited.append(1)))
    monkeypatch.setattr(monitor, "_compare", lambda: compared.append(len(monitor._seconds)) or compare())
    monitor.device = torch.device("cuda")
    run(monitor, module, 15)
    assert len(waited) == 10
    assert compared == [10]


@pytest.mark.usefixtures("single_rank")
def test_a_closed_monitor_has_no_group(tmp_path):
    monitor, *_ = make(tmp_path)
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    monitor.close()
    monitor.close()
    assert len(torch.distributed.distributed_c10d._world.pg_map) == groups - 1
