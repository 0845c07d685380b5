"""Lower bounds of pipelines are never above the exact value, and variable fixing leaves out nothing fast enough."""

import itertools

import numpy as np
import pytest

from lightning_mist.tuner import Planner
from lightning_mist.tuner.bounds.pipeline_bounds import open_stages
from lightning_mist.tuner.inter_stage import PipelineGroup
from tests.tuner.instances import random_instance
from tests.tuner.plans import is_feasible
from tests.tuner.problems import random_problem, slot, small_seeds
from tests.tuner.searches import searched


def prepared(seed, unlike=0):
    found = random_instance(seed, unlike=unlike)
    planner = Planner(found.network, found.machine, profile=found.rates)
    space = planner.space(found.rows * found.machine.world_size, found.search)
    return planner.stages(space, found.memory_limit, found.host_memory_limit)


def group_of(count, microbatches, parts=(0,)):
    """The group of one pipeline, whose stages pass some parts."""
    return PipelineGroup(microbatches, parts, (count,))


@pytest.mark.parametrize("unlike", [0, 1])
@pytest.mark.parametrize("seed", range(40))
def test_no_pipeline_takes_less_than_its_bound(seed, unlike):
    maker = prepared(seed, unlike)
    kinds = frozenset(maker.space.search.offloaded if maker.space.offload_ratios else ())
    for (count, microbatches, parts), found in searched(maker).found.items():
        seconds = found.answer.objective
        if count > 1:
            group = group_of(count, microbatches, parts)
            assert maker.lower_bound(group, 2 * seconds, np.inf) <= seconds * (1 + 1e-9)
            assert maker.lower_bound(group, seconds / 2, np.inf) <= seconds / 2
            assert maker.bounds.open_stages(group, (count,), seconds * 1.01, kinds).counts == (count,)


def test_bounds_are_the_same_in_whatever_order_they_are_asked_for():
    compared = 0
    for seed in range(30):
        maker = prepared(seed)
        microbatches = [count for stages, count in maker.space.pipelines() if stages == 2]
        if not microbatches:
            continue
        group = group_of(2, microbatches[-1])
        wanted = prepared(seed).lower_bound(group, 1e9, np.inf)
        for below in (wanted / 2, wanted * 2, 1e9, wanted / 2) if wanted < 1e9 else ():
            assert maker.lower_bound(group, below, np.inf) == pytest.approx(min(wanted, below), rel=1e-8)
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("seed", range(8))
def test_where_nothing_is_fast_enough_the_bound_is_what_was_asked_for(seed):
    maker = prepared(seed)
    for stages, microbatches in maker.space.pipelines():
        if stages > 1:
            assert maker.lower_bound(group_of(stages, microbatches), 1e-12, np.inf) == 1e-12


def answers_of(problem):
    """Every feasible answer with its step seconds."""
    for chosen in itertools.product(*(range(len(item)) for item in problem.slots)):
        if is_feasible(problem, chosen):
            yield chosen, problem.objective(chosen)


SEEDS = [
    seed
    for seed in small_seeds(250)
    if len(random_problem(seed).slots) > 1 and len(random_problem(seed).num_devices) == 1
]


@pytest.mark.parametrize("seeds", [SEEDS[start::4] for start in range(4)])
def test_what_is_fast_enough_stays_open(seeds):
    fixed = 0
    for seed in seeds:
        problem = random_problem(seed)
        answers = list(answers_of(problem))
        best = min((seconds for _, seconds in answers), default=1.0)
        for below in (best * 1.01, best * 1.5, best * 20):
            found = open_stages(problem.alone(), below)
            for chosen, seconds in answers:
                if seconds < below:
                    assert len(chosen) in found.counts
                    assert problem.steady(chosen).max() <= found.slowest * (1 + 1e-9)
                    for stage, (item, index) in enumerate(zip(problem.slots, chosen, strict=True)):
                        assert found.of(stage, len(chosen))[item.devices_K[index], item.layers_K[index]]
            every = {
                (n, length) for item in problem.slots for n, length in zip(item.devices_K, item.layers_K, strict=True)
            }
            fixed += len(every) - (found.heads_NL.any(axis=0) | found.tails_NL.any(axis=(0, 1))).sum()
    assert fixed > 0


def test_what_the_others_cannot_complete_is_fixed():
    # Three layers on three devices: a first stage with one leaves two layers to two, not to one.
    first = slot([0, 0], [1, 1], [1, 2], [1.0, 0.5], [0.0, 0.0])
    last = slot([1], [2], [2], [1.0], [0.0])
    problem = random_problem(SEEDS[0])
    problem = type(problem)(num_layers=3, num_devices=(3,), num_microbatches=4, slots=(first, last))
    found = open_stages(problem.alone(), 100.0)
    assert np.argwhere(found.of(0, 2)).tolist() == [[1, 1]]
    assert np.argwhere(found.of(1, 2)).tolist() == [[2, 2]]
    # Both take a second: of four rounds and one more at least two are each stage's own.
    assert found.slowest == pytest.approx(min(100 / 4, (100 - 2) / 3))
    assert not open_stages(problem.alone(), 3.0).counts
