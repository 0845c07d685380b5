"""What is timed on a card, and how errors are told."""

import pytest

from benchmarks.accuracy import card_times
from benchmarks.accuracy.card_times_run import plans_of


def test_plans_are_for_one_device():
    plans = plans_of(4, 8)
    assert len(plans) == 9
    for plan in plans.values():
        assert (plan.num_layers, plan.world_size, plan.global_batch_size) == (4, 1, 8)


def test_errors_are_of_what_ran():
    samples = [
        {"predicted_step_seconds": 1.1, "measured_step_seconds": 1.0, "predicted_bytes": None, "measured_bytes": 5},
        {"predicted_step_seconds": 0.8, "measured_step_seconds": 1.0},
        {"predicted_step_seconds": 9.0, "error": "out of memory"},
    ]
    assert card_times.summary(samples) == "step: mean absolute error 15.0%, largest -20.0%, of 2 plans"


def test_without_a_card_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr("sys.argv", ["card_times"])
    monkeypatch.setattr(card_times.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(card_times, "write_record", lambda record: pytest.fail("a record was written"))
    with pytest.raises(SystemExit, match="no CUDA device was found"):
        card_times.main()
