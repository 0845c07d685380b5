import json

import pytest

from lightning_mist.plan import save
from tests.cli.networks import refused, run
from tests.cli.test_show_command import PLAN
from tests.report.networks import predicted


def test_simulate(tmp_path, capsys):
    save(predicted(2, 4), tmp_path / "plan.json")
    run("simulate", tmp_path / "plan.json")
    text = capsys.readouterr().out
    assert text.startswith("one step on a clock: ")
    assert "critical path" in text


def test_simulate_as_json(tmp_path, capsys):
    plan = predicted(2, 4)
    save(plan, tmp_path / "plan.json")
    run("simulate", tmp_path / "plan.json", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == pytest.approx(plan.predicted.step_seconds)
    assert [group["stages"] for group in found["groups"]] == [[0], [1]]
    assert all(
        sum(group["work_seconds"].values()) + group["waiting_seconds"] == pytest.approx(found["step_seconds"])
        for group in found["groups"]
    )
    assert found["critical_path"]["actions"][0]["action"] == "0F0"


def test_a_plan_without_seconds_is_refused(tmp_path, capsys):
    save(PLAN, tmp_path / "plan.json")
    assert "the plan has no predicted seconds" in refused(capsys, "simulate", tmp_path / "plan.json")
