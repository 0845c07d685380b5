"""Without a card: that it says so, and what it would run."""

import argparse
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from benchmarks import card


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["card"])
    monkeypatch.setattr(card, "write_record", lambda record: pytest.fail("a record was written"))
    with pytest.raises(SystemExit, match="no CUDA device was found"):
        card.main()


@pytest.mark.parametrize("devices", [1, 2])
def test_plans_are_for_the_cards_there_are(devices):
    for plan in card.plans_for(devices, 8, 8).values():
        assert (plan.num_layers, plan.world_size, plan.global_batch_size) == (8, devices, 8 * devices)


@pytest.mark.parametrize(
    ("inside", "error"),
    [("", None), ('<failure message="off by 1"/>', "failure: off by 1"), ("<skipped/>", "skipped: ")],
)
def test_what_became_of_a_test_is_told(inside, error):
    case = ElementTree.fromstring(f'<testcase classname="tests.a" name="b[c]">{inside}</testcase>')
    assert card._case(case) == {"what": "test", "name": "tests.a::b[c]"} | ({} if error is None else {"error": error})


def test_runs_are_compared_with_ddp_and_failures_are_told(monkeypatch):
    stages = [{"predicted_bytes": 5, "measured_bytes": 6}]

    def run(module, arguments, *, processes, timeout_seconds):
        if "ddp" in arguments:
            return {"step_seconds": [3.0, 1.0, 2.0], "losses": [1.0, 0.5], "report": None}
        if run.calls:
            raise RuntimeError("NCCL: duplicate GPU")
        run.calls += 1
        return {"step_seconds": [2.0], "losses": [1.0, 0.25], "report": {"stages": stages}}

    run.calls = 0
    monkeypatch.setattr(card, "run_module", run)
    options = argparse.Namespace(steps=2, layers=8, width=16, length=16, batch_size=8, precision="32-true")
    plans = dict(list(card.plans_for(1, 8, 8).items())[:2])
    ddp, first, second = card.trained(1, options, plans)
    assert (ddp["step_seconds"], ddp["largest_loss_difference"]) == (2.0, 0.0)
    assert (first["name"], first["largest_loss_difference"], first["stage_0_measured_bytes"]) == ("plain", 0.25, 6)
    assert second["error"] == "NCCL: duplicate GPU"
