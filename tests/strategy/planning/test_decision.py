from dataclasses import replace

import pytest

from lightning_mist.plan import ModuleMap, SearchSpace, plan_of
from lightning_mist.strategy.planning.decision import Decision, searched_with


def test_loaders_are_the_strategys_and_not_only_what_is_searched():
    assert searched_with(None, 2) == SearchSpace(data_parallel_size=2)
    assert searched_with(SearchSpace(), None) == SearchSpace()
    assert searched_with(SearchSpace(data_parallel_size=2), 2).data_parallel_size == 2
    with pytest.raises(ValueError, match="give it to the strategy"):
        searched_with(SearchSpace(data_parallel_size=2), None)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"num_microbatches": 2}, False),
        ({"zero_stage": 1}, False),
        ({"checkpointed_layers": 1}, False),
        ({"pipeline_stages": 2}, False),
        ({"tensor_parallel_degree": 2}, False),
        ({"data_parallel_size": 1}, False),
    ],
)
def test_only_plain_data_parallelism_is_left_to_ddp(changes, plain):
    given = {"num_microbatches": 1, **changes}
    loaders = given.pop("data_parallel_size", None)
    plan = replace(plan_of(4, world_size=2, global_batch_size=8, **given), data_parallel_size=loaders)
    empty = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=())
    decision = Decision(plan=plan, module_map=empty, has_unused_parameters=False, planning_seconds=0.0, plan_path=None)
    assert decision.plan.is_plain == plain
