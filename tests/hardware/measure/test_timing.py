import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.hardware.measure.timing import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    MOST_CALLS,
    Session,
    heating_calls,
    measure,
    summarize,
)

SINGLE = Session(device=torch.device("cpu"), world=None)


def test_outliers_are_rejected() -> None:
    timing = summarize([1.0, 1.1, 0.9, 1.0, 50.0])
    assert (timing.seconds, timing.samples, timing.outliers) == (1.0, 4, 1)
    assert timing.spread == pytest.approx(0.05)


def test_equal_samples_have_no_spread_and_any_other_is_an_outlier() -> None:
    assert summarize([2.0, 2.0, 2.0, 7.0]).seconds == 2.0
    assert summarize([2.0]).spread == 0.0


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20))
def test_summary_lies_within_the_samples(samples: list[float]) -> None:
    timing = summarize(samples)
    assert min(samples) <= timing.seconds <= max(samples)
    assert timing.samples + timing.outliers == len(samples)
    assert timing.spread >= 0


def test_short_functions_are_called_many_times_per_sample_long_ones_a_few_times() -> None:
    calls = []
    timing = measure(lambda: calls.append(1), session=SINGLE, budget_seconds=0.01)
    assert len(calls) > 1000
    assert MIN_SAMPLES <= timing.samples + timing.outliers <= MAX_SAMPLES
    slow = []
    product = torch.randn(600, 600)
    timing = measure(lambda: slow.append(product @ product), session=SINGLE, budget_seconds=0.0)
    assert timing.samples + timing.outliers == MIN_SAMPLES


def test_a_single_process_agrees_with_itself() -> None:
    assert SINGLE.agree([1.0, 2.0]) == [1.0, 2.0]


def test_a_device_is_heated_for_about_as_long_as_asked() -> None:
    assert heating_calls(0.0, 1e-3) == 0
    assert heating_calls(0.1, 3e-3) == 34
    assert heating_calls(0.1, 1.0) == 1
    assert heating_calls(0.1, 1e-7) == MOST_CALLS


def test_heating_is_no_sample() -> None:
    calls: list[None] = []

    # A thousand seconds of what takes microseconds are more calls than the most.
    timing = measure(lambda: calls.append(None), session=SINGLE, budget_seconds=1e-9, heat_seconds=1e3)
    assert timing.samples + timing.outliers == MIN_SAMPLES
    assert len(calls) >= MOST_CALLS
