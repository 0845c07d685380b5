import itertools

import numpy as np
import pytest

from lightning_mist.tuner.inter_stage.problem import Family, InterStageProblem
from lightning_mist.tuner.inter_stage.suffix_dp import Suffixes
from tests.tuner.plans import is_feasible
from tests.tuner.problems import brute_force, random_family, slot

SEEDS = range(40)


def least(problem, bottleneck, cap):
    """The least sum of steady times at a bottleneck time, with the first boundary time if without a cap."""

    def value(item, chosen):
        steady, boundary = item.steady(chosen), item.boundary(chosen)
        exposed = max(0.0, float((boundary - np.cumsum(steady) + steady).max()))
        if steady.max() > bottleneck or (cap is not None and steady.sum() + exposed > cap * (1 + 1e-12)):
            return np.inf
        return float(steady.sum()) + (max(0.0, float(boundary[0])) if cap is None else 0.0)

    return brute_force(problem, value)


@pytest.mark.usefixtures("look_up")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_finds_the_least_sums_of_every_number_of_stages(seed):
    family = random_family(seed)
    suffixes = Suffixes(family)
    bottlenecks = suffixes.bottlenecks()
    for bottleneck in bottlenecks[[len(bottlenecks) // 3, -1]].tolist():
        free = {count: least(family.problem(count), bottleneck, None) for count in family.heads}
        walk = suffixes.walk(bottleneck)
        assert walk.values == pytest.approx({count: value for count, value in free.items() if np.isfinite(value)})
        for factor in (1.05, 1.6):
            cap = factor * min(free.values())
            if np.isinf(cap):
                continue
            wanted = {count: least(family.problem(count), bottleneck, cap) for count in family.heads}
            capped = suffixes.walk(bottleneck, cap)
            assert capped.values == pytest.approx({n: value for n, value in wanted.items() if np.isfinite(value)})


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if max(random_family(seed).heads) == 4])
def test_stages_whose_places_are_settled_pass_beside_others(seed):
    family = random_family(seed, alternates=True)
    suffixes = Suffixes(family)
    bottleneck = float(suffixes.bottlenecks()[-1])
    walk = suffixes.walk(bottleneck)
    found = {count: least(family.problem(count), bottleneck, None) for count in family.heads}
    assert walk.values == pytest.approx({count: value for count, value in found.items() if np.isfinite(value)})
    for count, value in walk.values.items():
        problem, chosen = family.problem(count), suffixes.chosen(walk, count)
        assert is_feasible(problem, chosen)
        assert problem.steady(chosen).sum() + max(0.0, float(problem.boundary(chosen)[0])) == pytest.approx(value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_of_one_number_of_stages_and_a_limit_finds_the_same_below_it(seed):
    family = random_family(seed)
    suffixes = Suffixes(family)
    bottleneck = float(suffixes.bottlenecks()[-1])
    for count, value in suffixes.walk(bottleneck).values.items():
        alone = suffixes.walk(bottleneck, only=count, limit=value)
        assert alone.values == {count: value}
        assert suffixes.chosen(alone, count) == suffixes.chosen(suffixes.walk(bottleneck), count)
        assert min(suffixes.walk(bottleneck, only=count, limit=value / 2).values.values(), default=np.inf) >= value


@pytest.mark.usefixtures("look_up")
@pytest.mark.parametrize("seed", SEEDS)
def test_choices_reach_what_a_pass_found(seed):
    family = random_family(seed)
    suffixes = Suffixes(family)
    walk = suffixes.walk(float(suffixes.bottlenecks()[-1]))
    for count, value in walk.values.items():
        problem, chosen = family.problem(count), suffixes.chosen(walk, count)
        assert is_feasible(problem, chosen)
        total = problem.steady(chosen).sum() + max(0.0, float(problem.boundary(chosen)[0]))
        assert total == pytest.approx(value)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_answer_is_faster_than_the_least_bottleneck(seed):
    family = random_family(seed)
    suffixes = Suffixes(family)
    slowest = [brute_force(family.problem(n), lambda p, chosen: float(p.steady(chosen).max())) for n in family.heads]
    assert suffixes.least_bottleneck() <= min(slowest) * (1 + 1e-9)
    assert not suffixes.walk(suffixes.least_bottleneck() * 0.99).values


@pytest.mark.parametrize("scale", [1.0, 1e15])
def test_layers_that_take_no_time_are_free(scale):
    """With bytes in place of seconds many choices have nothing, and others very much."""
    times = [0.0, scale], [0.0, 0.0]
    head = slot([0, 0], [1, 2], [1, 1], *times)
    last = slot([2, 1], [1, 2], [1, 1], *times)
    problem = InterStageProblem(num_layers=3, num_devices=(2,), num_microbatches=1, slots=(head, last))
    suffixes = Suffixes(Family(num_layers=3, num_devices=(2,), num_microbatches=1, heads={2: head}, tails=(last,)))
    walk = suffixes.walk(scale)
    assert walk.values == {2: brute_force(problem, lambda item, chosen: float(item.steady(chosen).sum()))}
    assert walk.values == {2: scale}


def test_the_random_families_bind():
    """Their answers are limited by bottleneck times and by caps, on one part and on two."""
    kinds = {
        (len(family.num_devices), bool(np.isfinite(min(map(brute_force, map(family.problem, family.heads))))))
        for family in map(random_family, SEEDS)
    }
    assert kinds == set(itertools.product((1, 2), (True, False)))
