from dataclasses import replace

import pytest

from lightning_mist.plan import Checkpointing, OffloadRatios, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.plan.plan_text import recipe_of


def stage(first, count, devices, rows=1, *, tensor=1, sequence=False, zero=0, shard=None, recompute=0, **offload):
    return StagePlan(
        layers=(first, first + count),
        mesh=StageMesh(
            devices=devices,
            data_parallel_degree=len(devices) // tensor,
            tensor_parallel_degree=tensor,
            sequence_parallel=sequence,
            shard_degree=shard,
        ),
        microbatch_size=rows,
        zero_stage=ZeroStage(zero),
        checkpointing=Checkpointing(layers=recompute),
        offload=OffloadRatios(**offload),
    )


def plan(microbatches, *stages, schedule="1f1b"):
    rows = stages[0].microbatch_size * stages[0].data_parallel_degree * microbatches
    return Plan(global_batch_size=rows, num_microbatches=microbatches, stages=stages, schedule=schedule)


ALONE = plan(1, stage(0, 4, (0,)))
PAIR = plan(2, stage(0, 2, (2, 3)), stage(2, 2, (0, 1)))
CHUNKS = plan(
    2,
    stage(0, 1, (1,), recompute=1),
    stage(1, 1, (0,)),
    stage(2, 1, (1,)),
    stage(3, 1, (0,), recompute=1),
    schedule="interleaved-1f1b",
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ALONE, "dp 1, microbatch 1 x 1"),
        (plan(4, stage(0, 4, (0, 1), 2, zero=3)), "dp 2, zero 3, microbatch 2 x 4"),
        (PAIR, "pp 2, dp 2, microbatch 1 x 2"),
        (replace(PAIR, schedule="zb-h1"), "pp 2 by zb-h1, dp 2, microbatch 1 x 2"),
        (CHUNKS, "pp 2, vpp 2, recompute 2 of 4, microbatch 1 x 2"),
        (
            plan(
                2,
                stage(0, 5, (2, 3), 2, tensor=2, sequence=True, recompute=3, optimizer=1.0, activations=0.25),
                stage(5, 2, (0, 1), zero=1, recompute=2, optimizer=1.0),
            ),
            "tp 1 to 2 with sp, pp 2 (2 to 5 layers each), dp 1 to 2, zero 0 to 1, recompute 5 of 7, "
            "offload optimizer 100% and activations 0 to 25%, microbatch 1 to 2 x 2",
        ),
    ],
)
def test_recipes(given, words):
    assert recipe_of(given) == words


def test_a_recipe_says_in_what_groups_is_sharded_and_how_many_load():
    hybrid = plan(1, stage(0, 4, tuple(range(16)), zero=3, shard=8))
    assert recipe_of(hybrid) == "dp 16, zero 3 hsdp 2 x 8, microbatch 1 x 1"
    assert recipe_of(replace(hybrid, data_parallel_size=4)).endswith("microbatch 1 x 1, loaders 4")
    both = plan(1, stage(0, 2, tuple(range(4, 8)), zero=1, shard=2), stage(2, 2, tuple(range(4)), zero=1))
    assert recipe_of(both) == "pp 2, dp 4, zero 1 hsdp 2 x 2 and whole, microbatch 1 x 1"


def test_what_is_recomputed_by_operator_is_said():
    one = replace(stage(0, 4, (0,)), checkpointing=Checkpointing(layers=2, kind="selective"))
    assert recipe_of(plan(1, one)) == "dp 1, recompute 2 of 4 selective, microbatch 1 x 1"
