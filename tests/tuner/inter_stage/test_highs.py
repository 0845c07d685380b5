import os
from dataclasses import replace

import highspy
import pytest

from lightning_mist.tuner.inter_stage.exact_solver import solve
from lightning_mist.tuner.inter_stage.flow_program import solve_program
from tests.tuner.problems import random_problem, small_seeds


def problem(scale=1.0):
    """A problem of several stages that has an answer, with times of any size."""
    made = next(item for item in map(random_problem, small_seeds(60)) if solve(item).chosen and len(item.slots) > 2)
    slots = tuple(
        replace(slot, steady_K=slot.steady_K * scale, boundary_K=slot.boundary_K * scale) for slot in made.slots
    )
    return replace(made, slots=slots)


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e5])
def test_optimum_at_every_scale(scale):
    found = solve_program(problem(scale), time_limit=10)
    assert found.objective == pytest.approx(scale * solve(problem()).objective)
    assert found.bound == pytest.approx(found.objective)


def test_says_nothing(capfd):
    assert solve_program(problem(), time_limit=10).chosen
    assert capfd.readouterr() == ("", "")


def test_what_the_solver_says_of_itself_is_no_part_of_a_program_s_output(capfd, monkeypatch):
    class Loud(highspy.Highs):
        def __init__(self):
            os.write(1, b"Running HiGHS 1.16.0\n")
            super().__init__()

    monkeypatch.setattr(highspy, "Highs", Loud)
    assert solve_program(problem(), time_limit=10).chosen
    assert capfd.readouterr().out == ""
