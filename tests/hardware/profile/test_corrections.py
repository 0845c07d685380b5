import dataclasses
import random
from statistics import mean

import pytest

from lightning_mist.hardware import Observation, corrected, factor_of, learn
from lightning_mist.hardware.profile.corrections import BOUNDS, RUNS, TERMS
from lightning_mist.hardware.profile.hardware_profile import Correction, StepOverheads
from tests.specs import profile

TRUTH = {"forward": 1.25, "backward": 1.1, "communication": 0.7, "update": 1.6, "overhead": 0.8}

SUMS = (
    {"overhead": 0.3},
    {"forward": 1.0, "overhead": 0.1},
    {"communication": 0.6},
    {"update": 0.3, "communication": 0.1},
    {"backward": 2.0, "forward": 0.5, "communication": 0.4, "overhead": 0.1},
)
"""Uncorrected seconds of what is observed in every run of a fake machine."""


def expected(factors, terms):
    return sum(factors[term] * seconds for term, seconds in terms.items())


def observe(truth, sums=SUMS, noise=lambda: 1.0):
    return [Observation(expected=tuple(terms.items()), seconds=expected(truth, terms) * noise()) for terms in sums]


def factors_of(corrections):
    return {term: factor_of(corrections, term) for term in TERMS}


def one(seconds, corrections=()):
    (found,) = learn(corrections, [Observation(expected=(("update", 2.0),), seconds=seconds)])
    return found


def test_a_factor_is_the_median_of_one_and_what_runs_measured():
    first = one(2.6)
    assert (first.term, first.ratios) == ("update", (1.3,))
    assert first.factor == pytest.approx(1.15)
    second = one(2.8, [first])
    assert second.ratios == (1.3, 1.4)
    assert second.factor == 1.3
    assert one(2.4, [second]).factor == pytest.approx(1.25)


def test_factors_stay_within_their_bounds():
    assert one(100.0).ratios == (BOUNDS[1],)
    assert one(0.01).ratios == (BOUNDS[0],)


def test_hidden_factors_are_found():
    """What is seen in a sum is found too, as what it is seen with is known from elsewhere."""
    corrections = ()
    for _ in range(RUNS + 1):
        corrections = learn(corrections, observe(TRUTH))
    assert factors_of(corrections) == pytest.approx(TRUTH, abs=1e-9)
    assert {len(item.ratios) for item in corrections} == {RUNS}


def test_noise_moves_little():
    """Runs that differ by 10 % move what they agree on by much less."""
    draw, corrections, seen = random.Random(0), (), []
    for _ in range(200):
        corrections = learn(corrections, observe(TRUTH, noise=lambda: draw.gauss(1.0, 0.1)))
        seen.append([expected(factors_of(corrections), terms) / expected(TRUTH, terms) - 1 for terms in SUMS])
    for column in zip(*seen[20:], strict=True):
        assert abs(mean(column)) < 0.05
        assert mean(error**2 for error in column) ** 0.5 < 0.07


def test_one_odd_run_after_some_moves_next_to_nothing():
    corrections = ()
    for _ in range(3):
        corrections = learn(corrections, observe(dict.fromkeys(TERMS, 1.2)))
    for odd in (0.1, 0.5, 2.4, 100.0):
        after = factors_of(learn(corrections, observe(dict.fromkeys(TERMS, odd))))
        assert after == pytest.approx(dict.fromkeys(TERMS, 1.2))


def test_a_machine_that_has_changed_is_followed():
    corrections = ()
    for _ in range(30):
        corrections = learn(corrections, observe(dict.fromkeys(TERMS, 0.8)))
    for _ in range(RUNS):
        corrections = learn(corrections, observe(dict.fromkeys(TERMS, 1.5)))
    assert factors_of(corrections) == pytest.approx(dict.fromkeys(TERMS, 1.5))


def test_what_was_not_observed_stays_and_what_is_not_there_teaches_nothing():
    known = (Correction(term="update", factor=1.15, ratios=(1.3,)),)
    found = learn(known, [Observation(expected=(("forward", 1.0), ("communication", 0.0)), seconds=1.1)])
    assert [item.term for item in found] == ["forward", "update"]
    assert found[1] == known[0]
    for expected_seconds, seconds in (
        ((), 1.0),
        ((("update", 0.0),), 1.0),
        ((("update", 1.0),), 0.0),
        ((("update", 1.0), ("forward", 1.0), ("backward", 1.0)), 3.0),
    ):
        assert learn(known, [Observation(expected=expected_seconds, seconds=seconds)]) == known


def test_a_profile_says_that_it_is_corrected():
    plain = dataclasses.replace(
        profile(),
        overheads=StepOverheads(step_seconds=1.0, action_seconds=2.0, unit_seconds=4.0, split_operator_seconds=3.0),
    )
    assert corrected(plain, ()) is plain
    corrections = (
        Correction(term="forward", factor=1.1, ratios=(1.2,)),
        Correction(term="overhead", factor=0.5, ratios=(0.5, 0.5, 0.5)),
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
