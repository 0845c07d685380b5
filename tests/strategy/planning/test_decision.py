import pytest

from lightning_mist.plan import ModuleMap, plan_of
from lightning_mist.strategy.planning.decision import Decision


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"num_microbatches": 2}, False),
        ({"zero_stage": 1}, False),
        ({"checkpointed_layers": 1}, False),
        ({"pipeline_stages": 2}, False),
        ({"tensor_parallel_degree": 2}, False),
    ],
)
def test_only_plain_data_parallelism_is_left_to_ddp(changes, plain):
    plan = plan_of(4, world_size=2, global_batch_size=8, **{"num_microbatches": 1, **changes})
    empty = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=())
    decision = Decision(plan=plan, module_map=empty, has_unused_parameters=False, planning_seconds=0.0, plan_path=None)
    assert decision.plan.is_plain == plain
