import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.hardware.catalog.interference_kinds import interference_of_kind
from lightning_mist.hardware.measure.device_bench import (
    ConcurrentTimes,
    fit_interference,
    of_vector,
    predicted_seconds,
    relative_errors,
    vector_of,
)
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS, Interference
from tests.tiers import examples

PRIOR = interference_of_kind(staged=False, shared=True)


def drawn(machine: Interference, count: int, seed: int, noise: float = 0.0, across: bool = True) -> ConcurrentTimes:
    random = np.random.default_rng(seed)
    loads = random.integers(0, 5, (4, count)) * 3e-3
    far = random.random(count) < 0.5 if across else np.zeros(count, dtype=bool)
    blank = ConcurrentTimes(loads=loads, seconds=np.ones(count), across_nodes=far)
    together = predicted_seconds(blank, machine) * (1 + noise * random.standard_normal(count))
    keep = (loads > 0).sum(axis=0) > 1
    return dataclasses.replace(blank, seconds=together).pick(keep)


@settings(max_examples=examples(10))
@given(st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9), st.integers(0, 100))
def test_many_measurements_give_the_coefficients_back(values: list[float], seed: int) -> None:
    truth = of_vector(np.array(values), PRIOR)
    times = drawn(truth, 300, seed)
    found = fit_interference(times, PRIOR, "test")
    assert vector_of(found) == pytest.approx(np.array(values), abs=0.05)
    assert found.spread < 0.01
    assert found.source == "test"


def test_noise_and_disturbed_measurements_do_not_carry_it_away() -> None:
    truth = of_vector(np.linspace(0.1, 0.9, 9), PRIOR)
    times = drawn(truth, 300, seed=1, noise=0.05)
    disturbed = times.seconds.copy()
    disturbed[::10] *= 3.0
    found = fit_interference(dataclasses.replace(times, seconds=disturbed), PRIOR, "test")
    assert vector_of(found) == pytest.approx(vector_of(truth), abs=0.15)


def test_what_was_not_measured_stays_as_it_was() -> None:
    truth = of_vector(np.full(9, 0.9), PRIOR)
    found = fit_interference(drawn(truth, 300, seed=2, across=False), PRIOR, "test")
    for name in COEFFICIENTS:
        expected = getattr(PRIOR if "across" in name else truth, name)
        assert getattr(found, name) == pytest.approx(expected, abs=0.05)
    nothing = drawn(truth, 300, seed=2).pick(np.array([], dtype=int))
    unchanged = fit_interference(nothing, PRIOR, "test")
    assert vector_of(unchanged) == pytest.approx(vector_of(PRIOR), abs=1e-3)
    assert unchanged.spread == 0.0


def test_few_measurements_move_it_towards_the_truth() -> None:
    truth = of_vector(np.full(9, 0.9), interference_of_kind(staged=False, shared=False))
    start = interference_of_kind(staged=False, shared=False)
    rest = drawn(truth, 200, seed=4)
    errors = [
        float(np.abs(relative_errors(rest, fit_interference(drawn(truth, count, seed=3), start, "test"))).mean())
        for count in (1, 12, 100)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


def test_spread_is_the_mean_error_of_what_was_measured() -> None:
    times = drawn(of_vector(np.full(9, 0.4), PRIOR), 100, seed=5, noise=0.1)
    found = fit_interference(times, PRIOR, "test")
    assert found.spread == pytest.approx(float(np.abs(relative_errors(times, found)).mean()))
    assert found.spread > 0.02


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="row of loads for each of 4 channels"):
        ConcurrentTimes(loads=np.ones((3, 2)), seconds=np.ones(2), across_nodes=np.zeros(2, dtype=bool))
