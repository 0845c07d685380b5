import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Checkpointing, ModuleMap, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.strategy.planning import Decision, _refuse_sharding


def test_sharding_is_refused_where_ranks_must_hold_everything():
    _refuse_sharding(plan(zero=0), "LBFGS")
    _refuse_sharding(plan(zero=1), None)
    with pytest.raises(PlanError, match=r"zero_stage of \[1\], but LBFGS"):
        _refuse_sharding(plan(zero=1), "LBFGS")


def plan(*, devices=(0, 1), microbatches=1, zero=0, checkpointed=0, stages=1, tp=1):
    per_stage = len(devices) // stages
    return Plan(
        global_batch_size=8,
        num_microbatches=microbatches,
        stages=tuple(
            StagePlan(
                layers=(2 * index, 2 * index + 2),
                mesh=StageMesh(
                    devices=devices[index * per_stage : (index + 1) * per_stage],
                    data_parallel_degree=per_stage // tp,
                    tensor_parallel_degree=tp,
                ),
                microbatch_size=8 // (microbatches * per_stage // tp),
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
        ({"tp": 2}, False),
    ],
)
def test_only_plain_data_parallelism_is_left_to_ddp(changes, plain):
    empty = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=())
    decision = Decision(
        plan=plan(**changes), module_map=empty, has_unused_parameters=False, planning_seconds=0.0, plan_path=None
    )
    assert decision.is_plain == plain
