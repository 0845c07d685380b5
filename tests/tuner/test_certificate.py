from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.tuner.inter_stage import flow_program as inter_stage
from lightning_mist.tuner.inter_stage.flow_program import FlowProgram, SolverError
from lightning_mist.tuner.inter_stage.problem import PRECISION
from tests.tuner.searches import each_by_itself, searched, stages_of


def test_what_refutes_the_dynamic_program_is_taken_and_said(monkeypatch):
    stages = stages_of()
    least = min(each_by_itself(stages).values())
    monkeypatch.setattr(
        inter_stage,
        "solve_program",
        lambda problem, *, time_limit, incumbent: replace(incumbent, objective=least / 2, bound=0.0),
    )
    outcome = searched(stages)
    assert outcome.winner.answer.objective == least / 2
    assert outcome.bound == 0.0
    assert not outcome.certified
    assert "report" in outcome.notes[0]


def test_a_solver_that_fails_takes_nothing_from_what_is_proven(monkeypatch):
    stages = stages_of()

    def fail(*_, **__):
        raise SolverError("HiGHS ended with Solve error")

    monkeypatch.setattr(FlowProgram, "solve", fail)
    outcome = searched(stages)
    assert outcome.winner.answer.objective == pytest.approx(min(each_by_itself(stages).values()))
    assert outcome.bound == pytest.approx(outcome.winner.answer.objective, rel=2 * PRECISION)
    assert not outcome.certified
    assert outcome.notes == ("not checked by HiGHS: HiGHS ended with Solve error",)


def test_an_optimum_is_proven_once_more():
    stages = stages_of()
    outcome = searched(stages)
    found = outcome.winner
    again = inter_stage.check(found, np.inf)
    assert again.certified
    assert not again.refutes
    assert again.found is found
    assert again.notes == ()
