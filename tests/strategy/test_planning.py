from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelPruning, StochasticWeightAveraging

from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import Checkpointing, ModuleMap, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.strategy.planning import Decision, on_rank_zero, whole_module_reason

PARAMETER = torch.nn.Parameter(torch.zeros(1))
SGD = torch.optim.SGD([PARAMETER], lr=0.1)


def trainer(*callbacks, automatic=True):
    return SimpleNamespace(
        lightning_module=SimpleNamespace(automatic_optimization=automatic), callbacks=[ModelCheckpoint(), *callbacks]
    )


@pytest.mark.parametrize(
    ("callbacks", "automatic", "optimizers", "expected"),
    [
        ((), True, [SGD], None),
        ((), False, [SGD], "automatic_optimization=False"),
        ((), True, [SGD, SGD], "2 optimizers"),
        ((), True, [torch.optim.LBFGS([PARAMETER])], "LBFGS"),
        ((StochasticWeightAveraging(swa_lrs=0.1),), True, [SGD], "StochasticWeightAveraging: it averages"),
        ((ModelPruning("l1_unstructured"),), True, [SGD], "ModelPruning: it masks"),
        ((BackboneFinetuning(),), True, [SGD], "BackboneFinetuning: it changes"),
    ],
)
def test_what_needs_the_whole_module_is_named(callbacks, automatic, optimizers, expected):
    reason = whole_module_reason(trainer(*callbacks, automatic=automatic), optimizers)
    assert (reason is None) if expected is None else (expected in reason)


@pytest.mark.usefixtures("single_rank")
def test_work_of_rank_zero_gives_its_result_or_its_error():
    assert on_rank_zero(lambda: 5) == 5

    def fail():
        raise InfeasibleError("nothing fits")

    with pytest.raises(InfeasibleError, match="nothing fits"):
        on_rank_zero(fail)


def plan(*, devices=(0, 1), microbatches=1, zero=0, checkpointed=0, stages=1):
    per_stage = len(devices) // stages
    return Plan(
        global_batch_size=8,
        num_microbatches=microbatches,
        stages=tuple(
            StagePlan(
                layers=(2 * index, 2 * index + 2),
                mesh=StageMesh(
                    devices=devices[index * per_stage : (index + 1) * per_stage], data_parallel_degree=per_stage
                ),
                microbatch_size=8 // (microbatches * per_stage),
                zero_stage=ZeroStage(zero),
                checkpointing=Checkpointing(layers=checkpointed),
            )
            for index in range(stages)
        ),
    )


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"microbatches": 2}, False),
        ({"zero": 1}, False),
        ({"checkpointed": 1}, False),
        ({"stages": 2}, False),
    ],
)
def test_only_plain_data_parallelism_is_left_to_ddp(changes, plain):
    empty = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=())
    decision = Decision(
        plan=plan(**changes), module_map=empty, has_unused_parameters=False, planning_seconds=0.0, plan_path=None
    )
    assert decision.is_plain == plain
