"""What was interrupted goes on as under DDP: wherever it ended, however it was saved, under any plan."""

import json

import pytest

from tests.integration.restarts_worker import pairwise, write_outcomes
from tests.workers import forks

WORST = [
    "error|on_before_optimizer_step|0|5||plain|zero3",
    "SIGTERM|on_train_batch_start|1|5|stateful|without validation|auto",
    "requeue|validation_step|0|5||interval|pp2",
]


def outcomes(cases, folder):
    process = forks().Process(target=write_outcomes, args=(cases, folder))
    process.start()
    process.join()
    return json.loads((folder / "outcomes.json").read_text())


def check(found):
    assert {case: text for case, (text, _) in found.items() if text} == {}, [said for _, said in found.values()]


def test_the_worst_go_on_as_under_ddp(tmp_path):
    check(outcomes(WORST, tmp_path))


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_any_two_circumstances_go_on_as_under_ddp(tmp_path):
    check(outcomes(pairwise(), tmp_path))
