import dataclasses

import pytest

from lightning_mist.cost import StageCostModel, predict
from lightning_mist.tuner.clocked import clocked, step_seconds_of_plan
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline


def test_a_plan_on_the_clock_has_its_prediction():
    network, machine = spec(4), cluster(2)
    plan = pipeline({"layers": 2}, {"layers": 2})
    found = clocked(StageCostModel(network, profile(), machine), plan)
    assert dataclasses.replace(found, predicted=None) == plan
    assert found.predicted == predict(network, profile(), machine, plan)
    assert step_seconds_of_plan(found) == found.predicted.step_seconds


def test_without_a_prediction_there_are_no_seconds():
    with pytest.raises(AssertionError):
        step_seconds_of_plan(pipeline({"layers": 4}))
