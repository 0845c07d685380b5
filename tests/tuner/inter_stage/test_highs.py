import os

import highspy
import numpy as np
import pytest

from lightning_mist.tuner.inter_stage.flow_program import FlowProgram


def knapsack(scale=1.0):
    """Take exactly two of three; the slowest counts three times."""
    program = FlowProgram(scale=scale)
    costs = scale * np.array([3.0, 1.0, 2.0])
    x = program.add_binaries(costs)
    (slowest,) = program.add_seconds([3.0])
    program.add_row(x, np.ones(3), lower=2.0, upper=2.0)
    for index, cost in zip(x, costs, strict=True):
        program.add_row(np.array([index]), np.array([-cost]), lower=0.0, seconds=[(int(slowest), 1.0)])
    return program


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e5])
def test_optimum_at_every_scale(scale):
    solution = knapsack(scale).solve(time_limit=10)
    assert solution.status == "optimal"
    assert solution.values[:3].tolist() == [0.0, 1.0, 1.0]
    assert solution.values[3] == pytest.approx(2 * scale)
    assert solution.objective == pytest.approx(9 * scale)
    assert solution.bound == pytest.approx(9 * scale)


def test_a_start_is_taken():
    solution = knapsack(10.0).solve(time_limit=10, start=np.array([0.0, 1.0, 1.0, 20.0]))
    assert solution.objective == pytest.approx(90.0)


def test_infeasible_is_a_status():
    program = knapsack()
    program.add_row(np.arange(3), np.ones(3), upper=1.0)
    solution = program.solve(time_limit=10)
    assert solution.status == "infeasible"
    assert len(solution.values) == 0
    assert solution.objective == solution.bound == np.inf


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_is_positive(scale):
    with pytest.raises(ValueError, match="positive and finite"):
        FlowProgram(scale=scale)


def test_says_nothing(capfd):
    knapsack().solve(time_limit=10)
    assert capfd.readouterr() == ("", "")


def test_what_the_solver_says_of_itself_is_no_part_of_a_program_s_output(capfd, monkeypatch):
    class Loud(highspy.Highs):
        def __init__(self):
            os.write(1, b"Running HiGHS 1.16.0\n")
            super().__init__()

    monkeypatch.setattr(highspy, "Highs", Loud)
    assert knapsack().solve(time_limit=10).status == "optimal"
    assert capfd.readouterr().out == ""
