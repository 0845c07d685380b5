from time import perf_counter

import numpy as np
import pytest

from lightning_mist.tuner import SearchSpace, checked, search
from lightning_mist.tuner.bound import PRECISION, solve
from lightning_mist.tuner.likely import quick_bounds
from lightning_mist.tuner.past import Precedent
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.problem import InterStageProblem
from lightning_mist.tuner.tally import Tally
from tests.specs import cluster, profile, spec


def stages_of(devices=4, rows=4, memory=10**12, nodes=1, **limits):
    """What the stages of a small network may be."""
    planner = Planner(spec(), cluster(devices, nodes=nodes), profile=profile())
    space = planner.space(rows * devices, SearchSpace(**{"schedules": ("1f1b",), "offload": (), **limits}))
    return planner.stages(space, memory)


def each_by_itself(stages):
    """The least step seconds of every pipeline, each solved alone."""
    space, found = stages.space, {}
    for num_stages, num_microbatches in space.pipelines():
        problem = InterStageProblem(
            num_layers=space.num_layers,
            num_devices=(space.world_size,),
            num_microbatches=num_microbatches,
            slots=tuple(stages.frontier(index, num_stages, num_microbatches) for index in range(num_stages)),
        )
        found[num_stages, num_microbatches] = solve(problem).objective
    return found


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
        if near < search.COMPARED * least:
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
    attempt, find = search._attempt, search._settle

    def late(tally, winner):
        with monkeypatch.context() as patch:
            patch.setattr(search, "_attempt", attempt if is_met else settle)
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


@pytest.mark.parametrize("memory", [600_000, 700_000])
def test_a_pipeline_like_one_found_before_is_as_good_if_it_still_fits(memory):
    stages = stages_of(memory=memory)
    outcome = search.search_pipelines(stages, stages.space, np.inf)
    several = [item for item in outcome.found.values() if len(item.answer.chosen) > 1]
    assert several
    for found in several:
        tally = tally_of(stages_of(memory=memory))
        # Nothing is known of its number of stages, and nothing that would have to be beaten.
        precedent = Precedent.of(found.alone, found.problem.num_microbatches)
        most = found.answer.objective * 1.01
        search._look_like(tally, precedent, most)
        (like,) = tally.best.values()
        assert len(like.answer.chosen) == len(found.answer.chosen)
        assert like.answer.objective <= found.answer.objective * (1 + PRECISION)
        again = dict(tally.best)
        search._look_like(tally, precedent, most)
        assert tally.best == again
        tight = tally_of(stages_of(memory=100))
        search._look_like(tight, precedent, most)
        assert not tight.best


@pytest.mark.parametrize("close", [1.0, 2.0])
def test_other_numbers_of_stages_are_searched_until_enough_that_are_close_are_known(monkeypatch, close):
    counts, compare = [], search._compare

    def noted(tally, groups, most, num_stages):
        known = {count for count in tally.best if tally.least_of(count) <= tally.least * close}
        counts.append((num_stages, len(known)))
        compare(tally, groups, most, num_stages)

    monkeypatch.setattr(search, "CLOSE", close)
    monkeypatch.setattr(search, "_compare", noted)
    monkeypatch.setattr(search, "ENOUGH", 1)
    stages = stages_of(memory=600_000)
    outcome = search.search_pipelines(stages, stages.space, np.inf)
    wanted = search.compared(stages.space, outcome.winner)
    looked = [count for count, _ in counts]
    assert outcome.winner > 2
    assert looked == list(wanted if close == 1.0 else wanted[: len(looked)])
    # The winner is as close as can be.
    assert all(known <= search.ENOUGH for count, known in counts if count > 1)
    assert (len(looked) < len(wanted)) == (close > 1)


def test_precedents_that_are_no_pipelines_of_the_space_are_left_out():
    stages = stages_of(memory=700_000)
    alone = search.search_pipelines(stages, stages.space, np.inf)
    counts = search.compared(stages.space, alone.winner)
    none = Precedent(num_microbatches=7, layers=(1, 1), devices=(1, 3), slowest=1.0)
    precedents = dict.fromkeys(counts, none)
    found = search.search_pipelines(stages_of(memory=700_000), stages.space, np.inf, (), precedents)
    assert set(counts) > {1}
    assert found.best.keys() == alone.best.keys()
    assert found.bound == alone.bound


def tally_of(stages):
    lower = quick_bounds(stages, stages.space)
    floors = search.floors_of(stages, stages.space)
    limits = {"deadline": np.inf, "patience": np.inf}
    return Tally(
        intra=stages, space=stages.space, lower=lower, bounds=dict(lower), floors=floors, is_warm=False, **limits
    )
