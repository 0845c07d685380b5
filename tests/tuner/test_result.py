import pytest

from lightning_mist.plan import Plan, Predicted, PredictedStage, StageMesh, StagePlan
from lightning_mist.tuner import Alternative, TuneResult, TuneStats


def plan(seconds, **changes):
    stage = PredictedStage(
        steady_seconds=seconds, boundary_seconds=0.0, forward_seconds=seconds, backward_seconds=0.0, peak_bytes=2**20
    )
    return Plan(
        global_batch_size=2,
        num_microbatches=1,
        stages=(StagePlan(layers=(0, 4), mesh=StageMesh(devices=(0,)), microbatch_size=2),),
        predicted=Predicted(step_seconds=seconds, stages=(stage,)),
        **changes,
    )


def result(status, **changes):
    best = plan(0.5, **changes)
    return TuneResult(
        plan=best,
        status=status,
        bound=0.4,
        gap=0.2,
        closed_form_seconds=0.5,
        predicted=best.predicted,
        alternatives=(Alternative(name="2 stages", plan=plan(0.75)),),
        stats=TuneStats(seconds=1.0, candidates=12, pipelines=3, solved=2),
        notes=("seconds of layers are measured",),
    )


@pytest.mark.parametrize(
    ("status", "proof"),
    [
        ("optimal", "no plan of the search space is faster by the closed form of the cost model"),
        ("explored", "gpipe gains on the pipelines that it was tried on; others may gain more"),
        ("time limit", "time was up; a plan could be faster by at most 20.0%"),
    ],
)
def test_it_says_how_sure_it_is_what_else_there_was_and_where_numbers_come_from(status, proof):
    assert result(status, schedule="gpipe").explain() == (
        f"chosen among 12 stage candidates in 3 pipelines: {proof}",
        "2 stages instead: 750 ms per step (+50.0%), peak 1.0 MiB",
        "seconds of layers are measured",
    )
