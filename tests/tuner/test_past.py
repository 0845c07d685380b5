from math import inf

import numpy as np
import pytest

from lightning_mist.errors import InfeasibleError
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner import past as remembering
from lightning_mist.tuner.past import Past, known_answers, raised
from tests.specs import cluster, profile, spec

NETWORK = spec(6, tied=True, measured=True)
LOWER = {(1, 2): 1.0, (2, 2): 3.0}


def past(limit, bounds, *, host=inf, found=()):
    return Past.of((limit, host), bounds, list(found))


def test_bounds_hold_under_smaller_limits_only():
    pasts = [past(10, {(1, 2): 2.0, (2, 2): 2.0}), past(20, {(1, 2): 1.5}, host=5)]
    assert raised(LOWER, pasts, (10, inf)) == {(1, 2): 2.0, (2, 2): 3.0}
    assert raised(LOWER, pasts, (11, 5)) == {(1, 2): 1.5, (2, 2): 3.0}
    assert raised(LOWER, pasts, (11, 6)) == LOWER


def planner():
    return Planner(NETWORK, cluster(4, kind="cuda"), profile=profile())


def tuned(asked, limit, batch=16):
    try:
        return asked.tune(global_batch_size=batch, memory_limit=limit, search=SearchSpace(offload=()))
    except InfeasibleError:
        return None


def limits():
    """Limits from far too little to more than enough."""
    best = tuned(planner(), None)
    assert best is not None
    peak = max(stage.peak_bytes for stage in best.predicted.stages)
    return [int(peak * factor / 0.9) for factor in (0.05, 0.4, 0.6, 0.8, 0.95, 1.2)]


@pytest.mark.sample
@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_what_is_remembered_changes_no_answer(order):
    asked = planner()
    answers = []
    for limit in limits()[::order] + limits()[:: -2 * order]:
        new, again = tuned(planner(), limit), tuned(asked, limit)
        assert (new is None) == (again is None)
        if new is None or again is None:
            continue
        answers.append(again.predicted.step_seconds)
        assert (again.status, again.certified) == (new.status, new.certified)
        assert again.bound == pytest.approx(new.bound, rel=1e-8)
        assert again.gap <= 1e-8
        assert again.predicted.step_seconds == pytest.approx(new.predicted.step_seconds, rel=1e-3)
        assert max(stage.peak_bytes for stage in again.predicted.stages) <= limit
    assert len(set(answers)) > 1


def test_the_same_question_solves_nothing_but_the_winner():
    asked = planner()
    first, again = tuned(asked, None), tuned(asked, None)
    assert again.plan == first.plan
    assert again.certified
    assert again.stats.solved <= 1 <= first.stats.solved
    assert not again.stats.evaluated


def test_answers_that_do_not_fit_are_not_taken_over():
    asked = planner()
    assert tuned(asked, None) is not None
    pasts = asked._pasts.of(asked.space(16, SearchSpace(offload=())))
    found = pasts[0].found
    peaks = [max(float(slot.peak_K[0]) for slot in item.problem.slots) for item in found]
    middle = float(np.median(peaks))
    assert known_answers(pasts, (middle, inf)) == [
        item for item, peak in zip(found, peaks, strict=True) if peak <= middle
    ]


def test_spaces_asked_for_longest_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(remembering, "SPACES", 1)
    asked = planner()
    for batch in (16, 8):
        tuned(asked, None, batch)
    assert len(asked._pasts) == 1


@pytest.mark.sample
@pytest.mark.parametrize("first", [8, 32, 48])
def test_what_is_remembered_of_another_batch_changes_no_answer(first):
    asked = planner()
    tuned(asked, None, batch=first)
    for limit in limits():
        new, again = tuned(planner(), limit), tuned(asked, limit)
        assert (new is None) == (again is None)
        if new is not None and again is not None:
            assert (again.status, again.certified) == (new.status, new.certified)
            assert again.bound == pytest.approx(new.bound, rel=1e-8)
            assert again.predicted.step_seconds == pytest.approx(new.predicted.step_seconds, rel=1e-3)
