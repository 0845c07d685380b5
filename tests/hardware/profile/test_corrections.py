import dataclasses
import random
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.hardware import Observation, corrected, factor_of, learn
from lightning_mist.hardware.profile.corrections import BETWEEN_RUNS, BOUNDS, DRIFT, PRIOR_SPREAD, SURPRISE, TERMS
from lightning_mist.hardware.profile.hardware_profile import Correction, StepOverheads
from tests.specs import profile

TRUTH = {"forward": 1.25, "backward": 1.1, "communication": 0.7, "update": 1.6, "overhead": 0.8}

SUMS = (
    {"forward": 1.0, "overhead": 0.1},
    {"backward": 2.0, "forward": 0.5, "communication": 0.4, "overhead": 0.1},
    {"update": 0.3, "communication": 0.1},
    {"overhead": 0.3},
)
"""Uncorrected seconds of what is observed in every run of a fake machine."""


def expected(factors, terms):
    return sum(factors[term] * seconds for term, seconds in terms.items())


def observe(truth, sums=SUMS, spread=0.0, noise=lambda: 1.0):
    return [
        Observation(expected=tuple(terms.items()), seconds=expected(truth, terms) * noise(), spread=spread)
        for terms in sums
    ]


def factors_of(corrections):
    return {term: factor_of(corrections, term) for term in TERMS}


def test_one_term_by_hand():
    seen = Observation(expected=(("update", 2.0),), seconds=2.6, spread=0.1)
    (found,) = learn((), [seen])
    variance = PRIOR_SPREAD**2
    gain = variance * 2.0 / (variance * 4.0 + 4.0 * (BETWEEN_RUNS**2 + 0.1**2))
    assert (found.term, found.samples) == ("update", 1)
    assert found.factor == pytest.approx(1.0 + gain * (2.6 - 2.0))
    assert found.spread == pytest.approx((variance * (1 - 2.0 * gain)) ** 0.5)
    (again,) = learn([found], [seen])
    variance = found.spread**2 + DRIFT**2
    gain = variance * 2.0 / (variance * 4.0 + (2.0 * found.factor) ** 2 * (BETWEEN_RUNS**2 + 0.1**2))
    assert again.factor == pytest.approx(found.factor + gain * (2.6 - 2.0 * found.factor))
    assert again.samples == 2


def test_an_odd_observation_counts_as_one_at_the_edge_of_what_is_expected():
    def moved(seconds):
        (found,) = learn((), [Observation(expected=(("update", 2.0),), seconds=seconds, spread=0.1)])
        return found

    edge = 2.0 + SURPRISE * (4.0 * (PRIOR_SPREAD**2 + BETWEEN_RUNS**2 + 0.1**2)) ** 0.5
    assert moved(edge).factor == pytest.approx(moved(10 * edge).factor)
    assert moved(0.99 * edge).factor < moved(edge).factor


def test_predictions_approach_a_machine_with_hidden_factors():
    corrections, errors = (), []
    for _ in range(40):
        errors.append([expected(factors_of(corrections), terms) / expected(TRUTH, terms) - 1 for terms in SUMS])
        corrections = learn(corrections, observe(TRUTH))
    first, last = errors[0], errors[-1]
    assert max(map(abs, first)) > 0.2
    assert max(map(abs, last)) < 0.01
    # Nothing swings: errors shrink, but where observations share terms and one shifts the next by a little.
    for column in zip(*errors, strict=True):
        assert all(abs(after) <= max(abs(before), 0.015) for before, after in pairwise(column))
    found = factors_of(corrections)
    # What is seen apart is known apart; what is only seen in sums, in sums.
    assert all(abs(found[term] - TRUTH[term]) < 0.01 for term in ("forward", "overhead"))


@given(
    truth=st.floats(0.4, 3.0),
    seconds=st.floats(1e-6, 1e3),
    spread=st.floats(0.0, 1.0),
    runs=st.integers(1, 30),
)
def test_a_constant_truth_is_approached_from_one_side(truth, seconds, spread, runs):
    corrections, reachable = (), min(max(truth, BOUNDS[0]), BOUNDS[1])
    previous = 1.0
    for _ in range(runs):
        seen = Observation(expected=(("forward", seconds),), seconds=truth * seconds, spread=spread)
        corrections = learn(corrections, [seen])
        (found,) = corrections
        assert min(previous, reachable) - 1e-9 <= found.factor <= max(previous, reachable) + 1e-9
        assert BOUNDS[0] <= found.factor <= BOUNDS[1]
        assert 0 < found.spread <= PRIOR_SPREAD
        previous = found.factor


def test_noise_moves_little():
    """Runs that differ by 10 % move what they agree on by much less."""
    draw, corrections, seen = random.Random(0), (), []
    for _ in range(200):
        corrections = learn(corrections, observe(TRUTH, spread=0.05, noise=lambda: draw.gauss(1.0, 0.1)))
        seen.append([expected(factors_of(corrections), terms) / expected(TRUTH, terms) - 1 for terms in SUMS])
    for column in zip(*seen[20:], strict=True):
        assert abs(mean(column)) < 0.05
        assert mean(error**2 for error in column) ** 0.5 < 0.06


def test_one_odd_run_after_many_moves_little():
    corrections = ()
    for _ in range(30):
        corrections = learn(corrections, observe(dict.fromkeys(TERMS, 1.2)))
    before = factors_of(corrections)
    for odd in (0.1, 0.5, 2.4, 100.0):
        after = factors_of(learn(corrections, observe(dict.fromkeys(TERMS, odd))))
        assert all(0 <= (after[term] - before[term]) * (1 if odd > 1.2 else -1) < 0.06 for term in TERMS)


def test_a_machine_that_has_changed_is_followed_in_a_few_runs():
    corrections = ()
    for _ in range(30):
        corrections = learn(corrections, observe(dict.fromkeys(TERMS, 0.8)))
    for _ in range(10):
        corrections = learn(corrections, observe(dict.fromkeys(TERMS, 1.5)))
    for terms in SUMS:
        assert expected(factors_of(corrections), terms) == pytest.approx(1.5 * sum(terms.values()), rel=0.05)


def test_the_less_is_known_the_less_moves():
    def moved(spread):
        (found,) = learn((), [Observation(expected=(("forward", 1.0),), seconds=1.5, spread=spread)])
        return found.factor - 1

    steps = [moved(spread) for spread in (0.0, 0.1, 0.3, 1.0)]
    assert steps == sorted(steps, reverse=True)
    assert 0.35 < steps[0] < 0.5
    assert 0 < steps[-1] < 0.02


def test_what_was_not_observed_stays_and_what_is_not_there_teaches_nothing():
    known = (Correction(term="update", factor=1.3, spread=0.05, samples=4),)
    found = learn(known, [Observation(expected=(("forward", 1.0), ("communication", 0.0)), seconds=1.1, spread=0.0)])
    assert [item.term for item in found] == ["forward", "update"]
    assert found[1] == known[0]
    assert learn(known, []) == known
    assert learn(known, [Observation(expected=(("update", 0.0),), seconds=1.0, spread=0.0)]) == known
    assert learn(known, [Observation(expected=(("update", 1.0),), seconds=0.0, spread=0.0)]) == known


def test_a_profile_says_that_it_is_corrected():
    plain = dataclasses.replace(
        profile(),
        overheads=StepOverheads(step_seconds=1.0, action_seconds=2.0, unit_seconds=4.0, split_operator_seconds=3.0),
    )
    assert corrected(plain, ()) is plain
    corrections = (
        Correction(term="forward", factor=1.1, spread=0.02, samples=1),
        Correction(term="overhead", factor=0.5, spread=0.02, samples=3),
    )
    found = corrected(plain, corrections)
    assert found.source == "made up, corrected by 3 runs"
    assert corrected(plain, corrections[:1]).source == "made up, corrected by 1 run"
    assert found.corrections == corrections
    # The last two are parts of terms that have factors of their own.
    assert found.overheads == StepOverheads(
        step_seconds=0.5, action_seconds=1.0, unit_seconds=4.0, split_operator_seconds=3.0
    )
    with pytest.raises(ValueError, match="has corrections already"):
        corrected(found, corrections)
