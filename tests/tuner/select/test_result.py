from dataclasses import replace

import pytest

from lightning_mist.plan import Predicted, PredictedStage
from lightning_mist.tuner import Alternative, TuneResult, TuneStats
from lightning_mist.tuner.select import status_of
from tests.plans import plan_of


def plan(seconds, **changes):
    stage = PredictedStage(
        steady_seconds=seconds, boundary_seconds=0.0, forward_seconds=seconds, backward_seconds=0.0, peak_bytes=2**20
    )
    return plan_of(2, 1, {"layers": 4}, predicted=Predicted(step_seconds=seconds, stages=(stage,)), **changes)


def result(status, bound=0.4, **changes):
    return TuneResult(
        plan=plan(0.5, **changes),
        status=status,
        bound=bound,
        gap=0.2,
        closed_form_seconds=0.5,
        alternatives=(Alternative(name="2 stages", plan=plan(0.75)),),
        stats=TuneStats(seconds=1.0, candidates=12, pipelines=3, solved=2),
        notes=("seconds of layers are measured",),
    )


@pytest.mark.parametrize(
    ("status", "bound", "proof"),
    [
        ("optimal", 0.5, "no plan of the search space is faster by the closed form of the cost model"),
        (
            "optimal",
            0.49,
            "by the closed form of the cost model another plan takes 2.0% less, on the clock more",
        ),
        ("explored", 0.0, "it is the fastest that was tried; of others nothing is proven"),
        ("explored", 0.4, "gpipe gains on the pipelines that it was tried on; others may gain more"),
        ("time limit", 0.4, "time was up; by the closed form a plan could be faster by at most 20.0%"),
    ],
)
def test_it_says_how_sure_it_is_what_else_there_was_and_where_numbers_come_from(status, bound, proof):
    assert result(status, bound, schedule="gpipe").explain() == (
        f"chosen among 12 stage candidates in 3 pipelines: {proof}",
        "HiGHS has not certified it",
        "2 stages instead: 750 ms per step (+50.0%), peak 1.0 MiB",
        "seconds of layers are measured",
    )


@pytest.mark.parametrize(("gap", "status"), [(1e-12, "optimal"), (0.009, "time limit"), (1.0, "time limit")])
def test_what_is_proven_follows_from_the_gap(gap, status):
    assert status_of(gap) == status


@pytest.mark.parametrize(("gap", "is_proven"), [(0.0, True), (0.004, False)])
def test_under_another_schedule_it_is_known_too_whether_something_was_proven(gap, is_proven):
    found = replace(result("explored"), gap=gap)
    assert found.is_proven == is_proven
