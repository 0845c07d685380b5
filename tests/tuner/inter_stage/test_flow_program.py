import numpy as np
import pytest

from lightning_mist.tuner.inter_stage import flow_program as inter_stage
from lightning_mist.tuner.inter_stage import flow_program as milp
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION, solve
from lightning_mist.tuner.inter_stage.flow_program import solve_program
from lightning_mist.tuner.inter_stage.problem import Answer
from lightning_mist.tuner.options import OPTIONS
from tests.tuner.plans import is_feasible
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
    assert is_feasible(problem, program.chosen)
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
        assert is_feasible(problem, program.chosen)
        assert program.objective == pytest.approx(wanted, rel=TOLERANCE)


def some_answer(problem):
    """The first feasible combination, good or bad."""
    found = []

    def first(item, chosen):
        found.append(chosen)
        return item.objective(chosen)

    brute_force(problem, first)
    return Answer(chosen=found[0], objective=problem.objective(found[0]), bound=0.0)


@pytest.mark.parametrize("seed", small_seeds(60))
def test_what_the_dynamic_program_finds_is_certified(seed):
    problem = random_problem(seed)
    exact = solve(problem)
    program = solve_program(problem, time_limit=30, incumbent=exact)
    assert program.is_proven
    assert program.objective == pytest.approx(exact.objective, rel=2 * PRECISION)


def test_without_time_the_incumbent_and_a_true_bound_are_given():
    given = 0
    for seed in small_seeds(60):
        problem = random_problem(seed)
        wanted = brute_force(problem)
        if np.isinf(wanted):
            continue
        incumbent = some_answer(problem)
        program = solve_program(problem, time_limit=0.0, incumbent=incumbent)
        assert is_feasible(problem, program.chosen)
        assert program.objective <= incumbent.objective
        assert program.bound <= wanted * (1 + 1e-9)
        given += program.chosen == incumbent.chosen
    assert given


def test_too_large_programs_are_not_made(monkeypatch):
    problem = next(item for item in map(random_problem, small_seeds(60)) if solve(item).chosen and len(item.slots) > 2)
    monkeypatch.setattr(OPTIONS, "check_arcs", 0)
    incumbent = some_answer(problem)
    program = solve_program(problem, time_limit=30, incumbent=incumbent)
    assert program.chosen == incumbent.chosen
    assert program.bound == -np.inf


def some_problem():
    """A problem of several stages that has an answer."""
    return next(item for item in map(random_problem, small_seeds(60)) if solve(item).chosen and len(item.slots) > 2)


def test_a_solver_that_denies_a_known_answer_has_proven_nothing(monkeypatch):
    problem, nothing = some_problem(), np.empty(0)
    denied = milp.Solution(nothing, np.inf)
    monkeypatch.setattr(milp.FlowProgram, "solve", lambda *_, **__: denied)
    incumbent = some_answer(problem)
    program = solve_program(problem, time_limit=30, incumbent=incumbent)
    assert program.chosen == incumbent.chosen
    assert program.bound == -np.inf
    assert solve_program(problem, time_limit=30).bound == np.inf


def test_that_nothing_is_left_of_a_known_answer_has_proven_nothing(monkeypatch):
    problem = some_problem()
    incumbent, real = some_answer(problem), inter_stage.arcs_of
    monkeypatch.setattr(inter_stage, "arcs_of", lambda item, _: real(item, -np.inf))
    program = solve_program(problem, time_limit=30, incumbent=incumbent)
    assert program.chosen == incumbent.chosen
    assert program.bound == -np.inf
    assert solve_program(problem, time_limit=30).chosen == ()
