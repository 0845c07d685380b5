from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given

from lightning_mist.errors import PlanError
from lightning_mist.plan import (
    Checkpointing,
    ModuleMap,
    Plan,
    Predicted,
    StageMesh,
    StageMethod,
    StagePlan,
    ZeroStage,
    of_whole_batches,
    parts_of,
    proved_features,
)
from tests.plans import plans


def stage(layers, devices, **changes):
    mesh = StageMesh(devices=tuple(devices), data_parallel_degree=len(devices))
    return StagePlan(**{"layers": layers, "mesh": mesh, "microbatch_size": 4 // len(devices), **changes})


PLAN = Plan(global_batch_size=12, num_microbatches=3, stages=(stage((0, 2), [1, 2]), stage((2, 5), [0])))


def test_what_follows_from_a_plan():
    assert (PLAN.num_stages, PLAN.num_layers, PLAN.world_size, PLAN.num_replicas) == (2, 5, 3, 1)
    assert PLAN.bounds == ((0, 2), (2, 5))
    assert [PLAN.stage_of(rank) for rank in range(3)] == [1, 0, 0]
    assert [s.num_layers for s in PLAN.stages] == [2, 3]
    with pytest.raises(PlanError, match="rank 3 is in no stage: the plan is for 3 devices"):
        PLAN.stage_of(3)


def test_a_plan_is_frozen():
    with pytest.raises(FrozenInstanceError):
        PLAN.num_microbatches = 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "a plan without stages"),
        ({"schedule": "zigzag"}, "schedule = 'zigzag': known schedules are 1f1b, gpipe"),
        ({"num_microbatches": 0}, "num_microbatches = 0: both must be at least 1"),
        ({"global_batch_size": 13}, "stage 0: .* = 12: it must equal global_batch_size 13"),
        ({"stages": (stage((0, 2), [1, 2]), stage((3, 5), [0]))}, "stage 1 starts at layer 3: it must start at 2"),
        ({"stages": (stage((1, 2), [0]),)}, "stage 0 starts at layer 1: it must start at 0"),
        ({"stages": (stage((0, 2), [1, 2]), stage((2, 2), [0]))}, "stage 1 has no layers"),
        ({"stages": (stage((0, 2), [1, 2]), stage((2, 5), [1]))}, r"devices \[1, 1, 2\] over all stages"),
        ({"stages": (stage((0, 2), [1, 2]), stage((2, 5), [3]))}, r"every rank from 0 to 2 must be in exactly one"),
        (
            {"stages": (stage((0, 2), [1, 2], tail_chunks=2), stage((2, 5), [0]))},
            "stage 0: tail_chunks = 2, and what is",
        ),
        ({"data_parallel_size": 2}, "data_parallel_size = 2 on 3 devices: .* it must divide 3 and be less"),
        ({"data_parallel_size": 3}, "data_parallel_size = 3 on 3 devices: .* leave it out"),
        ({"predicted": Predicted(step_seconds=1.0, stages=())}, r"predicted\.stages has 0 entries for 2 stages"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **changes)


def test_parts_are_of_the_batch_of_one_loader():
    halves = (stage((0, 2), [0, 1]), stage((2, 5), [2, 3]))
    plan = Plan(global_batch_size=12, num_microbatches=3, stages=halves, data_parallel_size=2)
    assert (plan.num_loaders, plan.num_replicas, plan.is_plain) == (2, 2, False)
    assert replace(plan, data_parallel_size=1).num_replicas == 1
    quarters = tuple(stage((index, index + 1), [index]) for index in range(4))
    with pytest.raises(PlanError, match=r"stage 0: .* = 3 parts: .* a multiple of 2; use data_parallel_size = 1"):
        Plan(global_batch_size=12, num_microbatches=3, stages=quarters, data_parallel_size=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": (2, 1)}, r"layers \[2, 1\]: a half-open range"),
        ({"layers": (-1, 1)}, r"layers \[-1, 1\]: a half-open range"),
        ({"microbatch_size": 0}, "microbatch_size = 0: at least one row"),
        ({"checkpointing": Checkpointing(layers=3)}, "checkpointed_layers = 3 in a stage of 2 layers: at most 2"),
    ],
)
def test_stages_that_contradict_themselves_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        stage(**{"layers": (0, 2), "devices": [0], **arguments})


def test_a_module_without_blocks_has_one_stage_without_layers():
    assert Plan(global_batch_size=4, num_microbatches=1, stages=(stage((0, 0), [0]),)).num_layers == 0


@given(plans(runnable=False))
def test_every_rank_is_in_the_stage_that_names_it(plan):
    groups = plan.stages[: plan.num_groups]
    assert sorted(rank for s in groups for rank in s.devices) == list(range(plan.world_size))
    assert sorted(stage for group in range(plan.num_groups) for stage in plan.chunks(group)) == list(
        range(plan.num_stages)
    )
    for rank in range(plan.world_size):
        assert rank in plan.stages[plan.stage_of(rank)].devices
    assert all(s.data_parallel_degree % plan.num_replicas == 0 for s in plan.stages)


def interleaved(devices, num_microbatches=4, **changes):
    stages = tuple(
        stage((index, index + 1), ranks, **({} if index else changes), microbatch_size=8 // num_microbatches)
        for index, ranks in enumerate(devices)
    )
    return Plan(global_batch_size=8, num_microbatches=num_microbatches, stages=stages, schedule="interleaved-1f1b")


def test_chunks_share_their_devices():
    plan = interleaved([[1], [0], [1], [0]])
    assert (plan.num_stages, plan.num_groups, plan.world_size) == (4, 2, 2)
    assert [plan.group_of(index) for index in range(4)] == [0, 1, 0, 1]
    assert plan.chunks(1) == (1, 3)
    assert (plan.stage_of(1), plan.stage_of(0)) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": [[0], [1]]}, "2 stages on 2 groups of devices"),
        ({"devices": [[0], [1], [0]]}, "3 stages on 2 groups of devices"),
        ({"devices": [[0], [1], [0], [1]], "num_microbatches": 1}, "must be a multiple; use 2"),
        ({"devices": [[0], [1], [1], [0]]}, "stage 2 shares devices with stage 0"),
        ({"devices": [[0], [1], [0], [1]], "zero_stage": ZeroStage.GRADIENTS}, "stage 2 shares devices"),
    ],
)
def test_chunks_that_do_not_go_round_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        interleaved(**arguments)


def test_chunks_behind_the_last_layer_are_on_one_device_each():
    with pytest.raises(PlanError, match="tail_chunks = 0: at least one chunk is needed; use 1 for none"):
        stage((0, 2), [0], tail_chunks=0)
    mesh = StageMesh(devices=(0, 1), tensor_parallel_degree=2)
    with pytest.raises(PlanError, match="tail_chunks = 2 where 2 devices share rows or layers"):
        StagePlan(layers=(0, 2), mesh=mesh, microbatch_size=4, tail_chunks=2)
    made = stage((0, 4), [0], tail_chunks=4)
    assert (made.on_rows(6).tail_chunks, made.on_rows(2).tail_chunks, made.on_rows(4, mesh).tail_chunks) == (2, 2, 1)
    assert [made.part(*layers, 1).tail_chunks for layers in ((0, 2), (2, 4))] == [1, 4]
    assert StageMethod.of_code(made.method.code) == made.method == StageMethod(tail_chunks=4)
    plan = Plan(global_batch_size=4, num_microbatches=1, stages=(made,))
    assert (plan.is_plain, replace(plan, stages=(replace(made, tail_chunks=1),)).is_plain) == (False, True)
    assert (stage((0, 4), [0], tail_chunks=3).on_rows(6).tail_chunks, parts_of(plan)) == (3, (4,))
    of_rows = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=())
    of_tokens, odd = replace(of_rows, tokens=8), replace(plan, stages=(replace(made, tail_chunks=3),))
    assert proved_features(plan, of_rows) == ("microbatches", "tail_chunks")
    assert proved_features(odd, of_tokens) == ("tail_chunks", "tail_tokens")
    assert proved_features(odd, of_tokens.excluding("it pools", "tail_tokens"))[0] == "microbatches"
    assert of_whole_batches(plan).stages[0].tail_chunks == 1
