from time import perf_counter

import numpy as np
import pytest

from lightning_mist.tuner import checked, near_optimal, search
from lightning_mist.tuner.bound import PRECISION
from lightning_mist.tuner.likely import quick_bounds
from tests.tuner.searches import each_by_itself, stages_of


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("memory", [10**12, 10**6, 600_000])
def test_families_find_what_each_pipeline_has_by_itself(nodes, memory):
    stages = stages_of(nodes=nodes, memory=memory)
    wanted = each_by_itself(stages)
    outcome = search.search_pipelines(stages, stages.space, np.inf)
    least = min(wanted.values())
    assert outcome.certified
    assert outcome.notes == ()
    assert outcome.solved <= outcome.pipelines == len(wanted)
    assert outcome.bound == pytest.approx(least, rel=2 * PRECISION)
    assert outcome.best[outcome.winner].answer.objective == pytest.approx(least, rel=2 * PRECISION)
    for count, found in outcome.best.items():
        near = min(value for key, value in wanted.items() if key[0] == count)
        assert found.answer.objective >= near * (1 - PRECISION)
        if near < near_optimal.COMPARED * least:
            assert found.answer.objective == pytest.approx(near, rel=2 * PRECISION)
    for key, found in outcome.found.items():
        assert key == (len(found.answer.chosen), found.problem.num_microbatches)
        assert found.problem.is_feasible(found.answer.chosen)
        assert found.answer.objective >= wanted[key] * (1 - PRECISION)


def test_without_time_there_is_an_answer_and_a_true_bound():
    stages = stages_of()
    least = min(each_by_itself(stages).values())
    outcome = search.search_pipelines(stages, stages.space, perf_counter() - 1)
    assert outcome.best[outcome.winner].answer.objective >= least * (1 - PRECISION)
    assert outcome.bound <= least * (1 + PRECISION)


def test_where_nothing_fits_there_is_no_winner():
    stages = stages_of(memory=100)
    outcome = search.search_pipelines(stages, stages.space, np.inf)
    assert outcome.winner is None
    assert not outcome.certified


@pytest.mark.parametrize("is_met", [True, False])
def test_what_is_proven_without_all_ratios_is_not_certified(monkeypatch, is_met):
    stages = stages_of(memory=700_000, offload=("optimizer",), offload_ratios=(0.0, 0.5, 1.0))
    assert stages.space.offload_ratios
    real, seen = checked.solve_program, []

    def program(problem, **asked):
        seen.append(problem)
        return real(problem, **asked)

    def settle(tally, counts, num_microbatches, below):
        raise search.TimeIsUpError

    monkeypatch.setattr(checked, "solve_program", program)
    attempt, find = search.attempt, search._settle

    def late(tally, winner):
        with monkeypatch.context() as patch:
            patch.setattr(search, "attempt", attempt if is_met else settle)
            return find(tally, winner)

    monkeypatch.setattr(search, "_settle", late)
    outcome = search.search_pipelines(stages, stages.space, np.inf)
    assert len(seen) == 1
    assert outcome.certified == is_met


def test_a_search_without_a_plan_stops_when_time_is_up(monkeypatch):
    stages = stages_of(memory=100)
    every = search.search_pipelines(stages, stages.space, np.inf)
    assert not every.is_late
    assert every.bound == np.inf
    monkeypatch.setattr(search, "FIRST_SECONDS", 0.0)
    stages = stages_of(memory=100)
    outcome = search.search_pipelines(stages, stages.space, perf_counter() - 1)
    assert outcome.winner is None
    assert outcome.is_late
    assert outcome.solved == 0 < every.solved
    assert outcome.bound == min(quick_bounds(stages, stages.space).values())
