from time import thread_time

import numpy as np
import pytest

from benchmarks.planner.apart import spec_of
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import PRESETS
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.candidates.offload_search import TimeIsUpError
from lightning_mist.tuner.inter_stage import flow_program as inter_stage
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.search import search_loop
from lightning_mist.tuner.search.search_loop import SearchState
from tests.tuner.plans import is_feasible
from tests.tuner.searches import each_by_itself, searched, stages_of


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("memory", [10**12, 10**6, 600_000])
def test_families_find_what_each_pipeline_has_by_itself(nodes, memory):
    stages = stages_of(nodes=nodes, memory=memory)
    wanted = each_by_itself(stages)
    outcome = searched(stages)
    least = min(wanted.values())
    assert outcome.certified
    assert outcome.notes == ()
    assert outcome.solved <= outcome.pipelines == len(wanted)
    assert outcome.bound == pytest.approx(least, rel=2 * PRECISION)
    assert outcome.winner.answer.objective == pytest.approx(least, rel=2 * PRECISION)
    best = {}
    for key, found in outcome.found.items():
        assert key[:2] == (len(found.answer.chosen), found.problem.num_microbatches)
        assert is_feasible(found.problem, found.answer.chosen)
        assert found.answer.objective >= wanted[key[:2]] * (1 - PRECISION)
        best[key.num_stages] = min(best.get(key.num_stages, np.inf), found.answer.objective)
    for count, seconds in best.items():
        assert seconds == pytest.approx(
            min(value for key, value in wanted.items() if key[0] == count), rel=2 * PRECISION
        )


def test_without_time_there_is_an_answer_and_a_true_bound():
    stages = stages_of()
    least = min(each_by_itself(stages).values())
    outcome = searched(stages, thread_time() - 1)
    assert outcome.winner.answer.objective >= least * (1 - PRECISION)
    assert outcome.bound <= least * (1 + PRECISION)


@pytest.mark.parametrize("memory", [10**12, 600_000])
def test_where_a_plan_is_known_only_faster_ones_are_looked_for(memory):
    whole = searched(stages_of(memory=memory))
    better = searched(stages_of(memory=memory), below=1.001 * whole.least)
    assert better.winner.answer.chosen == whole.winner.answer.chosen
    assert better.least == whole.least
    none = searched(stages_of(memory=memory), below=0.9 * whole.least)
    # What is met on the way may be slower; nothing is faster, and that is proven.
    assert none.least >= whole.least
    assert 0.9 * whole.least * (1 - 1e-9) <= none.bound <= whole.least
    assert none.solved <= whole.solved
    # Nor is anything of interest that is as fast, or near it.
    same = searched(stages_of(memory=memory), below=whole.least)
    assert same.winner is None
    assert not same.found
    assert same.solved < whole.solved or (memory < 10**12 and same.solved == whole.solved)


def test_where_nothing_fits_there_is_no_winner():
    stages = stages_of(memory=100)
    outcome = searched(stages)
    assert outcome.winner is None
    assert not outcome.certified


@pytest.mark.parametrize("has_time", [True, False])
def test_what_is_proven_without_all_ratios_is_not_certified(monkeypatch, has_time):
    stages = stages_of(memory=700_000, offload=("optimizer",), offload_ratios=(0.0, 0.5, 1.0))
    assert stages.space.offload_ratios
    real, seen = inter_stage.solve_program, []

    def program(problem, **asked):
        seen.append(problem)
        return real(problem, **asked)

    def late(*asked, **more):
        raise TimeIsUpError

    monkeypatch.setattr(inter_stage, "solve_program", program)
    if not has_time:
        monkeypatch.setattr(SearchState, "optima", late)
    outcome = searched(stages)
    assert len(seen) == 1
    assert outcome.certified == has_time
    assert outcome.is_late != has_time


def test_a_search_without_a_plan_stops_when_time_is_up(monkeypatch):
    stages = stages_of(memory=100)
    every = searched(stages)
    assert not every.is_late
    assert every.bound == np.inf
    monkeypatch.setattr(OPTIONS, "first_seconds", 0.0)
    stages = stages_of(memory=100)
    outcome = searched(stages, thread_time() - 1)
    assert outcome.winner is None
    assert outcome.is_late
    assert outcome.solved == 0 < every.solved
    assert outcome.bound == min(stages.quick_bounds().values())


def test_where_several_stages_take_all_the_time_a_single_one_is_still_looked_at(monkeypatch):
    def takes_all(state, *asked):
        state.deadline = state.patience = thread_time() - 1

    monkeypatch.setattr(OPTIONS, "likely", 0.0)
    monkeypatch.setattr(search_loop, "_solve_several", takes_all)
    stages = stages_of()
    outcome = searched(stages)
    assert len(outcome.winner.answer.chosen) == 1
    wanted = min(value for key, value in each_by_itself(stages).items() if key[0] == 1)
    assert outcome.least == pytest.approx(wanted, rel=2 * PRECISION)


@pytest.mark.parametrize("factor", [np.inf, 1.15, 1.05])
def test_a_single_stage_is_compared_with_if_it_is_faster_than_a_known_plan(factor, monkeypatch):
    spec = spec_of(PRESETS["gpt3-1.3b"], "gpt3-1.3b", "1x2xL4", rows=16, sequence_length=2048)
    planner = Planner(spec, parse_cluster("1x2xL4"))
    stages = planner.stages(planner.space(64, SearchSpace(offload=())), 17 << 30)
    below = factor * searched(stages).least
    found = searched(stages, below=below).found
    monkeypatch.setattr(OPTIONS, "likely", 0.0)
    assert searched(stages, below=below).found.keys() == found.keys()
    assert any(key.num_stages == 1 for key in found) == (factor > 1.1)
