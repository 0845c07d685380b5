from time import perf_counter

import numpy as np
import pytest

from lightning_mist.tuner import attempts
from lightning_mist.tuner.bound import PRECISION
from lightning_mist.tuner.offload_search import TimeIsUpError
from tests.tuner.searches import each_by_itself, stages_of, tally_of


@pytest.mark.parametrize(("counts", "num_microbatches"), [((1,), 1), ((1,), 2), ((2, 3, 4), 4), ((2, 3), 8)])
def test_what_is_found_is_the_best_and_bounds_are_true(counts, num_microbatches):
    stages = stages_of()
    wanted = each_by_itself(stages)
    least = {count: wanted[count, num_microbatches] for count in counts}
    best = min(least.values())
    tally = tally_of(stages)
    attempts.attempt(tally, list(counts), num_microbatches, best * 1.5)
    assert tally.least == pytest.approx(best, rel=2 * PRECISION)
    for count in counts:
        assert tally.bounds[count, num_microbatches] <= least[count] * (1 + PRECISION)
    proven = min(tally.bounds[count, num_microbatches] for count in counts)
    assert proven == pytest.approx(best, rel=2 * PRECISION)
    assert tally.solved == {(count, num_microbatches) for count in counts}


@pytest.mark.parametrize(("counts", "num_microbatches"), [((1,), 2), ((2, 3), 4)])
def test_where_nothing_is_better_that_is_proven(counts, num_microbatches):
    stages = stages_of()
    wanted = each_by_itself(stages)
    best = min(wanted[count, num_microbatches] for count in counts)
    tally, below = tally_of(stages), best * 0.9
    attempts.attempt(tally, list(counts), num_microbatches, below)
    assert tally.least >= below
    assert all(tally.bounds[count, num_microbatches] >= below * (1 - PRECISION) for count in counts)


def test_families_are_searched_until_none_can_be_better():
    stages = stages_of()
    tally = tally_of(stages)
    groups = [((2,), 2), ((2, 3, 4), 4), ((2, 3), 8)]
    attempts.search_families(tally, groups, np.inf)
    asked = [(count, group[1]) for group in groups for count in group[0]]
    best = min(value for key, value in each_by_itself(stages).items() if key in asked)
    assert tally.least == pytest.approx(best, rel=2 * PRECISION)
    assert {count for count, _ in tally.solved} <= {count for count, _ in asked}
    assert not tally.is_stopped


def test_a_search_that_runs_out_of_time_says_so(monkeypatch):
    stages = stages_of()
    late = tally_of(stages)
    late.deadline = late.patience = perf_counter() - 1
    attempts.search_families(late, [((2, 3), 4)], np.inf)
    assert late.is_stopped
    assert not late.solved

    def slow(*asked):
        raise TimeIsUpError

    monkeypatch.setattr(attempts, "family_of", slow)
    tally = tally_of(stages)
    attempts.search_families(tally, [((2, 3), 4), ((2, 3), 8)], np.inf)
    assert tally.is_stopped
    assert len({number for _, number in tally.solved}) == 1
    assert not tally.best
