from dataclasses import replace

import pytest

from lightning_mist.plan import Checkpointing, OffloadRatios, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.plan.plan_text import recipe_of, settings_of


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
        (ALONE, "1 stage; 1 microbatch of 1 row"),
        (plan(4, stage(0, 4, (0, 1), 2, zero=3)), "1 stage, data 2; 4 microbatches of 2 rows; ZeRO-3"),
        (
            plan(1, stage(0, 4, tuple(range(16)), zero=3, shard=8)),
            "1 stage, data 16; 1 microbatch of 1 row; ZeRO-3 HSDP 2 x 8",
        ),
        (
            plan(1, stage(0, 2, tuple(range(4, 8)), zero=1, shard=2), stage(2, 2, tuple(range(4)), zero=1)),
            "2 stages, each data 4; 1 microbatch of 1 row; ZeRO-1 HSDP 2 x 2, whole",
        ),
        (PAIR, "2 stages, each data 2; 2 microbatches of 1 row"),
        (replace(PAIR, schedule="zb-h1"), "2 stages (zb-h1), each data 2; 2 microbatches of 1 row"),
        (CHUNKS, "2 stages of 2 interleaved chunks; 2 microbatches of 1 row; recompute 1 of 2 layers"),
        (
            plan(
                2,
                stage(0, 3, (2, 3), 2, tensor=2, sequence=True, recompute=3, optimizer=1.0, activations=0.25),
                stage(3, 2, (0, 1), zero=1, recompute=2, optimizer=1.0),
            ),
            "2 stages: 1 with tensor 2 + sequence, then 1 with data 2; layers 3, 2; 2 microbatches of 2, 1 rows; "
            "ZeRO-0, 1; recompute all layers; on the host: optimizer, activations 25%, 0%",
        ),
        (
            plan(
                2,
                stage(0, 2, (1,), recompute=1, activations=0.5),
                stage(2, 2, (0,), recompute=1, activations=0.5, checkpoints=1.0),
            ),
            "2 stages; 2 microbatches of 1 row; recompute 1 of 2 layers; on the host: activations 50%, "
            "checkpoints 50%, 100%",
        ),
        (
            plan(3, *(stage(index, 1, (3 - index,), recompute=index < 1) for index in range(4))),
            "4 stages; 3 microbatches of 1 row; recompute 1, 0 (3 times) of 1 layers",
        ),
    ],
)
def test_words(given, words):
    assert settings_of(given) == words


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


def test_what_is_recomputed_by_operator_is_said():
    one = replace(stage(0, 4, (0,)), checkpointing=Checkpointing(layers=2, kind="selective"))
    assert recipe_of(plan(1, one)) == "dp 1, recompute 2 of 4 selective, microbatch 1 x 1"
