from dataclasses import replace

import pytest

from lightning_mist.plan import Predicted, StepWork, step_rates
from tests.plan.test_plan_tables import PLAN

WORK = StepWork(
    model_flops=8e12,
    peak_flops_per_second=4e12,
    peak_source="a data sheet",
    roofline_seconds=0.5,
    sequence_length=100,
)


def planned(work=WORK):
    return replace(PLAN, predicted=replace(PLAN.predicted, work=work))


def test_rates_of_a_step():
    rates = step_rates(planned(), 2.0)
    assert rates.step_seconds == 2.0
    assert rates.rows_per_second == 16.0
    assert rates.tokens_per_second == 1600.0
    assert rates.flops_per_second == pytest.approx(1e12)  # 8e12 in 2 s on 4 devices
    assert rates.utilisation == pytest.approx(0.25)
    assert rates.roofline_ratio == pytest.approx(4.0)


def test_what_is_not_known_is_left_out():
    rates = step_rates(
        planned(replace(WORK, peak_flops_per_second=0.0, roofline_seconds=0.0, sequence_length=None)), 2.0
    )
    assert (rates.tokens_per_second, rates.utilisation, rates.roofline_ratio) == (None, None, None)
    assert rates.flops_per_second == pytest.approx(1e12)


@pytest.mark.parametrize("predicted", [None, Predicted(step_seconds=1.5, stages=PLAN.predicted.stages)])
def test_without_a_prediction_rows_are_known(predicted):
    rates = step_rates(replace(PLAN, predicted=predicted), 2.0)
    assert (rates.rows_per_second, rates.tokens_per_second, rates.flops_per_second) == (16.0, None, None)


def test_a_step_of_no_time_has_no_rates():
    assert step_rates(planned(), 0.0) is None
