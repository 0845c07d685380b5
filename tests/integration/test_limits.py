"""A lower memory limit gives a plan that needs less, training stays under it, and in the end nothing fits."""

import pytest

from benchmarks.accuracy.limited import lower
from tests.machine import assume_profile
from tests.workers import launched

# Trains under one limit after the other.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    profiles = assume_profile(tmp_path_factory.mktemp("profiles"), 2)
    return launched(lower, 2, 0.5, 8, profiles)[0]


def test_the_plan_changes_with_the_limit(entries):
    plans = [entry["plan"] for entry in entries[:-1]]
    assert len(plans) >= 2
    kinds = [
        (len(plan["stages"]), plan["num_microbatches"], tuple(stage["checkpointed_layers"] for stage in plan["stages"]))
        for plan in plans
    ]
    assert len(set(kinds)) == len(kinds)


def test_training_stays_under_every_limit(entries):
    for entry in entries[1:-1]:
        assert max(entry["measured_bytes"]) <= entry["limit"]


def test_prediction_is_near_the_meter(entries):
    for entry in entries[:-1]:
        for predicted, measured in zip(entry["predicted_bytes"], entry["measured_bytes"], strict=True):
            assert predicted == pytest.approx(measured, rel=0.05)


def test_in_the_end_nothing_fits_and_the_error_says_what_binds(entries):
    assert "no plan fits" in entries[-1]["error"]
    assert "Largest terms" in entries[-1]["error"]
