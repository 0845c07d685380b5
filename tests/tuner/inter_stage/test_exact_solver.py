from time import thread_time

import numpy as np
import pytest

from lightning_mist.tuner.inter_stage.exact_solver import PRECISION, least_peak, solve, solve_each, solve_family
from lightning_mist.tuner.inter_stage.problem import Family, InterStageProblem
from lightning_mist.tuner.space.applied_space import ANYWHERE
from tests.tuner.plans import is_feasible
from tests.tuner.problems import brute_force, random_family, random_problem, slot, small_seeds


@pytest.mark.usefixtures("look_up")
@pytest.mark.parametrize("seed", small_seeds(150))
def test_equals_trying_everything(seed):
    problem = random_problem(seed)
    wanted, answer = brute_force(problem), solve(problem)
    if np.isinf(wanted):
        assert answer.chosen == ()
        assert np.isinf(answer.objective)
        assert np.isinf(answer.bound)
        return
    assert is_feasible(problem, answer.chosen)
    assert answer.objective == pytest.approx(wanted, rel=2 * PRECISION)
    assert answer.objective == problem.objective(answer.chosen)
    assert answer.bound == pytest.approx(wanted, rel=2 * PRECISION)
    assert answer.bound <= answer.objective


@pytest.mark.parametrize("seed", small_seeds(40))
def test_only_better_answers_are_given(seed):
    problem = random_problem(seed)
    wanted = brute_force(problem)
    if np.isinf(wanted):
        return
    assert solve(problem, below=wanted * 1.01).objective == pytest.approx(wanted, rel=2 * PRECISION)
    none = solve(problem, below=wanted * 0.99)
    assert none.chosen == ()
    assert none.bound >= wanted * 0.99 * (1 - PRECISION)


@pytest.mark.parametrize("seed", small_seeds(40))
def test_without_time_the_bound_still_holds(seed):
    problem = random_problem(seed)
    wanted, answer = brute_force(problem), solve(problem, deadline=thread_time() - 1)
    if np.isinf(wanted):
        assert answer.chosen == ()
        return
    assert is_feasible(problem, answer.chosen)
    assert answer.bound <= wanted * (1 + PRECISION) <= answer.objective * (1 + 2 * PRECISION)


@pytest.mark.parametrize("seed", small_seeds(60))
def test_the_least_peak_equals_trying_everything(seed):
    problem = random_problem(seed)
    found = least_peak(problem)
    wanted = brute_force(problem, lambda p, chosen: float(p.steady(chosen).max()))
    assert (np.inf if found is None else found[0]) == wanted
    if found is not None:
        assert is_feasible(problem, found[1])
        assert problem.steady(found[1]).max() == wanted


def test_a_slot_without_choices_has_no_answer():
    problem = InterStageProblem(
        num_layers=2,
        num_devices=(2,),
        num_microbatches=1,
        slots=(slot([0], [1], [1], [1.0], [0.0]), slot([], [], [], [], [])),
    )
    assert np.isinf(solve(problem).bound)
    assert least_peak(problem) is None


def test_hidden_boundary_time_costs_nothing():
    # The second stage may be slow at the boundary, because the first one is still busy then.
    slots = (
        slot([0, 0], [1, 1], [1, 1], [1.0, 1.1], [5.0, 0.0]),
        slot([1, 1], [1, 1], [1, 1], [1.0, 1.3], [1.05, 0.0]),
    )
    problem = InterStageProblem(num_layers=2, num_devices=(2,), num_microbatches=10, slots=slots)
    answer = solve(problem)
    assert answer.chosen == (1, 0)
    assert answer.objective == pytest.approx(9 * 1.1 + 2.1)


def test_an_open_start_may_lie_anywhere():
    slots = (
        slot([0], [2], [1], [2.0], [0.0]),
        slot([ANYWHERE, ANYWHERE], [1, 2], [1, 1], [1.0, 2.0], [0.0, 0.0]),
        slot([4], [1], [1], [1.0], [0.0]),
    )
    problem = InterStageProblem(num_layers=5, num_devices=(3,), num_microbatches=2, slots=slots)
    assert solve(problem).chosen == (0, 1, 0)


@pytest.mark.usefixtures("look_up")
@pytest.mark.parametrize("seed", range(60))
def test_a_family_is_as_good_as_the_best_of_its_problems(seed):
    family = random_family(seed)
    wanted = {count: brute_force(family.problem(count)) for count in family.heads}
    least, found = min(wanted.values()), solve_family(family)
    if np.isinf(least):
        assert found.num_stages == 0
        assert found.answers == {}
        assert np.isinf(found.bound)
        return
    assert found.answers[found.num_stages].objective == pytest.approx(least, rel=2 * PRECISION)
    assert found.bound == pytest.approx(least, rel=2 * PRECISION)
    for count, answer in found.answers.items():
        problem = family.problem(count)
        assert is_feasible(problem, answer.chosen)
        assert answer.objective == problem.objective(answer.chosen)
        assert answer.objective >= wanted[count] * (1 - PRECISION)
    none = solve_family(family, below=least * 0.99)
    assert none.num_stages == 0
    assert none.bound >= least * 0.99 * (1 - PRECISION)


@pytest.mark.parametrize("seed", range(60))
def test_a_tolerance_is_the_most_that_bound_and_answer_differ_by(seed):
    family, tolerance = random_family(seed), 0.05
    least = solve_family(family).bound
    found = solve_family(family, tolerance=tolerance)
    if np.isinf(least):
        assert np.isinf(found.bound)
        return
    objective = found.answers[found.num_stages].objective
    assert objective * (1 - 2 * tolerance) <= found.bound <= least * (1 + PRECISION)
    # That there is nothing is proven whatever the tolerance.
    below = least * (1 - 0.5 * tolerance)
    none = solve_family(family, below=below, tolerance=tolerance)
    assert none.num_stages == 0
    assert none.bound >= below * (1 - PRECISION)


@pytest.mark.parametrize("seed", range(60))
def test_each_number_of_stages_of_a_family_as_if_it_were_alone(seed):
    family = random_family(seed)
    alone = {count: solve(family.problem(count)) for count in family.heads}
    wanted = {count: answer.objective for count, answer in alone.items() if answer.chosen}
    below = dict.fromkeys(family.heads, np.inf)
    found = solve_each(family, below)
    assert found.keys() == wanted.keys()
    for count, answer in found.items():
        problem = family.problem(count)
        assert is_feasible(problem, answer.chosen)
        assert answer.objective == problem.objective(answer.chosen)
        assert wanted[count] * (1 - 2 * PRECISION) <= answer.objective <= wanted[count] * (1 + 2 * PRECISION)
        assert answer.bound <= wanted[count] * (1 + 2 * PRECISION)
    # Only those that are asked for, and only if they are better.
    some = {count: value * (0.99 if count % 2 else 1.5) for count, value in wanted.items()}
    assert solve_each(family, some).keys() == {count for count in wanted if not count % 2 and wanted[count] > 0}


@pytest.mark.parametrize("seed", range(60))
def test_with_each_comes_the_best_whose_slowest_stage_takes_less(seed):
    family = random_family(seed)
    for count, answer in solve_each(family, dict.fromkeys(family.heads, np.inf)).items():
        problem = family.problem(count)
        slowest = problem.steady(answer.chosen).max()

        def if_less(problem, chosen, slowest=slowest):
            return problem.objective(chosen) if problem.steady(chosen).max() < slowest * (1 - PRECISION) else np.inf

        wanted = brute_force(problem, if_less)
        if np.isinf(wanted):
            assert answer.lower_bottleneck == ()
            continue
        assert is_feasible(problem, answer.lower_bottleneck)
        assert if_less(problem, answer.lower_bottleneck) == pytest.approx(wanted, rel=2 * PRECISION)


def test_a_family_without_stages_has_no_answers():
    family = Family(num_layers=4, num_devices=(3,), num_microbatches=6, tails=(), heads={})
    assert solve_each(family, {2: np.inf}) == {}


@pytest.mark.parametrize("seed", range(30))
def test_a_family_without_time_has_a_true_bound(seed):
    family = random_family(seed)
    least = min(brute_force(family.problem(count)) for count in family.heads)
    found = solve_family(family, deadline=thread_time() - 1)
    assert found.bound <= least * (1 + PRECISION)
    assert (found.num_stages == 0) == np.isinf(least)


def test_families_of_random_problems_have_answers_and_have_none():
    least = [min(brute_force(family.problem(n)) for n in family.heads) for family in map(random_family, range(60))]
    assert 20 <= np.isfinite(least).sum() < 60


def test_of_a_family_without_pipelines_nothing_is_solved():
    none = Family(num_layers=3, num_devices=(2,), num_microbatches=4, tails=(), heads={})
    assert solve_each(none, {2: 1.0, 3: 1.0}) == {}
