import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import OffloadRatios, plan_of, row_slice


def grid(**changes):
    return plan_of(**{"num_layers": 12, "world_size": 8, "global_batch_size": 32, **changes})


def test_everything_is_data_parallel_by_default():
    plan = grid()
    assert (plan.num_stages, plan.num_microbatches, plan.world_size, plan.num_layers) == (1, 1, 8, 12)
    stage = plan.stages[0]
    assert (stage.data_parallel_degree, stage.microbatch_size, stage.checkpointing.layers) == (8, 4, 0)


def test_stages_are_alike_and_can_run():
    plan = grid(
        pipeline_stages=2, tensor_parallel_degree=2, zero_stage=3, checkpointed_layers="all", devices_per_node=4
    )
    assert plan.bounds == ((0, 6), (6, 12))
    assert (plan.num_microbatches, plan.stages[0].microbatch_size) == (4, 4)
    assert {(int(s.zero_stage), s.checkpointing.layers, s.mesh.tensor_parallel_degree) for s in plan.stages} == {
        (3, 6, 2)
    }
    assert 0 in plan.stages[-1].devices
    for rank in range(plan.world_size):
        row_slice(plan, rank, 0)


def test_zero_may_shard_within_groups():
    plan = grid(pipeline_stages=2, zero_stage=2, shard_degree=2)
    assert [stage.mesh.shard_degree for stage in plan.stages] == [2, 2]
    with pytest.raises(PlanError, match="shard_degree = 3 with 4 ranks"):
        grid(pipeline_stages=2, zero_stage=2, shard_degree=3)


def test_microbatches_by_number_or_by_size():
    assert grid(microbatch_size=2).num_microbatches == 2
    assert grid(num_microbatches=4).stages[0].microbatch_size == 1


def test_chunks_share_their_devices():
    plan = grid(pipeline_stages=2, chunks=3, schedule="interleaved-1f1b", num_microbatches=4)
    assert (plan.num_stages, plan.num_groups) == (6, 2)
    assert plan.stages[0].devices == plan.stages[2].devices != plan.stages[1].devices


def test_what_is_not_run_yet_can_be_said():
    plan = grid(context_parallel_degree=4, offload=OffloadRatios(optimizer=0.5))
    assert (plan.stages[0].mesh.context_parallel_degree, plan.stages[0].offload.optimizer) == (4, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_degree": 3}, r"8 devices with .* degrees of 3: .* use 2, or 9 devices"),
        ({"pipeline_stages": 16}, r"8 devices with .* degrees of 16: .* use 8, or 16 devices"),
        ({"data_parallel_degree": 4}, r"data_parallel_degree = 4 .* number of devices, 8; use data_parallel_degree=8"),
        ({"data_parallel_degree": 0}, r"data_parallel_degree = 0"),
        ({"data_parallel_degree": 2, "tensor_parallel_degree": 3}, r"data_parallel_degree = 2 .*; use 6 devices"),
        ({"tensor_parallel_degree": 0}, r"degrees \(0, 1, 1, 1\) .*: each must be at least 1"),
        ({"zero_stage": 4}, r"zero_stage = 4: ZeRO has stages 0 to 3"),
        ({"global_batch_size": 30}, r"global_batch_size = 30 over data_parallel_degree = 8: .* use 24 or 32 rows"),
        ({"global_batch_size": 0}, r"global_batch_size = 0: at least one row"),
        ({"num_microbatches": 3}, r"8 x 1 x 3 = 24 rows are not 32; use .*num_microbatches=2 with microbatch_size=2"),
        ({"microbatch_size": 3}, r"microbatch_size = 3 with 4 rows for each of 8 .*; use microbatch_size=2"),
        ({"microbatch_size": -1}, r"microbatch_size = -1: at least 1 is needed"),
        ({"pipeline_stages": 8, "num_layers": 12}, r"12 layers in 8 stages: .* use 6 stages, or a plan file"),
        ({"chunks": 2}, r"chunks = 2 under schedule '1f1b'"),
        ({"checkpointed_layers": 13}, r"checkpointed_layers = 13 in a stage of 12 layers"),
        ({"checkpointed_layers": -1}, r"checkpointed_layers = -1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(changes, message):
    with pytest.raises(PlanError, match=message):
        grid(**changes)
