from dataclasses import replace
from time import thread_time

import numpy as np
import pytest

from lightning_mist.hardware import MixedCluster
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from lightning_mist.tuner.search.search_loop import COMPARED, search_pipelines
from tests.specs import cluster, profile, spec
from tests.tuner.instances import random_instance
from tests.tuner.plans import is_feasible
from tests.tuner.whole_space import Instance, by_trying_everything


def question(**search):
    """Four layers on one fast and two slow devices."""
    return Instance(
        network=spec(4),
        machine=MixedCluster(parts=(cluster(1), cluster(2))),
        rates=(profile(flops_per_second=3e10), profile()),
        rows=2,
        memory_limit=10**9,
        search=SearchSpace(schedules=("1f1b",), offload=(), zero_stages=(0, 1), **search),
    )


def searched(asked, seconds=60.0):
    planner = asked.planner()
    space = planner.space(asked.global_batch_size, asked.search)
    return search_pipelines(planner.stages(space, asked.memory_limit), thread_time() + seconds)


def test_the_best_is_found_and_a_single_stage_beside_it():
    asked = question()
    found = searched(asked)
    wanted = {count: by_trying_everything(with_stages(asked, count)).seconds for count in (1, 2, 3)}
    least = min(wanted.values())
    winner = len(found.winner.answer.chosen)
    assert wanted[winner] == least
    assert found.winner.answer.objective == pytest.approx(least, rel=PRECISION)
    assert found.bound == pytest.approx(least, rel=PRECISION)
    assert found.certified
    assert not found.is_late
    assert winner != 1
    alone = [item.answer.objective for key, item in found.found.items() if key.num_stages == 1]
    assert alone == ([pytest.approx(wanted[1], rel=PRECISION)] if wanted[1] < COMPARED * least else [])


def with_stages(asked, count):
    return replace(asked, known={}, search=replace(asked.search, num_stages=(count,)))


def test_answers_are_pipelines_that_have_what_they_are_said_to_take():
    for (count, microbatches, parts), item in searched(question()).found.items():
        problem = item.problem
        assert (len(problem.slots), problem.num_microbatches) == (count, microbatches)
        assert is_feasible(problem, item.answer.chosen)
        if count > 1:
            picked = zip(problem.slots, item.answer.chosen, strict=True)
            assert tuple(dict.fromkeys(int(slot.part_K[index]) for slot, index in picked)) == parts
        assert problem.objective(item.answer.chosen) == pytest.approx(item.answer.objective, rel=1e-12)


def test_a_search_that_is_cut_short_says_so_and_proves_less():
    asked = replace(question(), network=spec(5))
    hurried, full = searched(asked, seconds=-1.0), searched(asked)
    assert hurried.is_late
    assert hurried.bound <= full.bound * (1 + PRECISION)
    assert hurried.solved < full.solved
    # It goes on until it has a plan.
    assert hurried.winner.answer.objective >= full.bound * (1 - PRECISION)


def test_without_pipelines_nothing_is_found():
    found = searched(question(num_stages=(3,), devices_per_stage=(2,)))
    assert found.winner is None
    assert found.bound == np.inf
    assert found.found == {}


def test_quick_bounds_are_no_more_than_what_plans_take():
    alone = 0
    for seed in range(1040, 1060):
        even = seed % 2 == 0
        asked = random_instance(
            seed, offloading=float(seed % 4 == 0), unlike=1.0, equal_stages=even, fewer_loaders=even
        )
        planner = asked.planner()
        stages = planner.stages(planner.space(asked.global_batch_size, asked.search), asked.memory_limit)
        bounds = stages.quick_bounds()
        for key, item in search_pipelines(stages, thread_time() + 60).found.items():
            assert bounds[key] <= item.answer.objective * (1 + PRECISION)
            alone += key.num_stages == 1
    assert alone
