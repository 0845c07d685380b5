from dataclasses import replace

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import OffloadRatios, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.runtime.support import check_supported

STAGE = StagePlan(layers=(0, 2), mesh=StageMesh(devices=(0, 1), data_parallel_degree=2), microbatch_size=1)


def _plan(stage):
    rows = stage.microbatch_size * stage.data_parallel_degree
    return Plan(global_batch_size=rows, num_microbatches=1, stages=(stage,))


@pytest.mark.parametrize("zero_stage", ZeroStage)
def test_every_zero_stage_runs(zero_stage):
    check_supported(_plan(replace(STAGE, zero_stage=zero_stage)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mesh": StageMesh(devices=(0, 1), tensor_parallel_degree=2, sequence_parallel=True)},
            r"stages\[0\]\.tensor_parallel_degree = 2.*data_parallel_degree=2",
        ),
        ({"mesh": StageMesh(devices=(0, 1), context_parallel_degree=2)}, r"stages\[0\]\.context_parallel_degree = 2"),
        ({"offload": OffloadRatios(optimizer=0.5)}, r"stages\[0\]\.offload\.optimizer = 0\.5"),
        ({"offload": OffloadRatios(activations=0.25)}, r"stages\[0\]\.offload\.activations = 0\.25"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change, message):
    with pytest.raises(PlanError, match=message):
        check_supported(_plan(replace(STAGE, **change)))
