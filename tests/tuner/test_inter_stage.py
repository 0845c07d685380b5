import numpy as np
import pytest

from lightning_mist.tuner.bound import solve
from lightning_mist.tuner.inter_stage import solve_program
from lightning_mist.tuner.problem import Answer
from tests.tuner.problems import brute_force, random_problem, small_seeds

TOLERANCE = 1e-6
"""The solver's own; it judges by absolute tolerances on scaled numbers."""


@pytest.mark.parametrize("seed", small_seeds(100))
def test_equals_the_dynamic_program_and_trying_everything(seed):
    problem = random_problem(seed)
    wanted, program = brute_force(problem), solve_program(problem, time_limit=30)
    exact = solve(problem)
    if np.isinf(wanted):
        assert program.chosen == exact.chosen == ()
        assert np.isinf(program.bound)
        return
    assert problem.is_feasible(program.chosen)
    assert program.objective == pytest.approx(wanted, rel=TOLERANCE)
    assert program.bound == pytest.approx(wanted, rel=TOLERANCE)
    assert exact.objective == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("seed", small_seeds(50))
def test_an_incumbent_changes_nothing_but_time(seed):
    problem = random_problem(seed)
    wanted = brute_force(problem)
    if np.isinf(wanted):
        assert solve_program(problem, time_limit=30, incumbent=solve(problem)).chosen == ()
        return
    for incumbent in (solve(problem), some_answer(problem)):
        program = solve_program(problem, time_limit=30, incumbent=incumbent)
        assert problem.is_feasible(program.chosen)
        assert program.objective == pytest.approx(wanted, rel=TOLERANCE)


def some_answer(problem):
    """The first feasible combination, good or bad."""
    found = []

    def first(item, chosen):
        found.append(chosen)
        return item.objective(chosen)

    brute_force(problem, first)
    return Answer(chosen=found[0], objective=problem.objective(found[0]), bound=0.0)
