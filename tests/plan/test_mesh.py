import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.plan import (
    ModuleMap,
    ParameterSplit,
    ParameterUse,
    Plan,
    StageMesh,
    StagePlan,
    TensorSplit,
    ZeroStage,
)
from lightning_mist.plan.mesh import (
    held_parameters,
    itemsize,
    make_mesh,
    names_with_values,
    needs_spreading,
    process_groups,
    row_ranks,
    stage_ranks,
    sums_wholes,
    tensor_ranks,
    tied_groups,
)
from tests.plans import plan_of


def make_plan(degrees, *, tensor=1, zero=0, shard=None, num_microbatches=None):
    number = len(degrees)
    widths = [tensor] * number if isinstance(tensor, int) else tensor
    zeros, shards = [zero] * number if isinstance(zero, int) else zero, shard or [None] * number
    count = num_microbatches or sum(degree * width for degree, width in zip(degrees, widths, strict=True))
    names = ("data", "tensor", "zero", "shard")
    stages = [dict(zip(names, values, strict=True)) for values in zip(degrees, widths, zeros, shards, strict=True)]
    return plan_of(12 * count, count, *stages)


def make_map(num_layers, *, tied=(), tied_size=7, degrees=()):
    """One weight of 10 (k + 1) entries per layer, a frozen one in the first, and one that nothing uses.

    With tensor-parallel degrees the weights are shared out, and the tied one where its size allows.
    """
    uses = [
        ParameterUse(
            name=f"w{k}",
            slots=((f"b{k}", "w", (k,)),),
            shape=(10, k + 1),
            dtype="float32",
            requires_grad=True,
        )
        for k in range(num_layers)
    ]
    uses.append(
        ParameterUse(
            name="tied",
            slots=(("m", "w", tied or (0,)),),
            shape=(tied_size,),
            dtype="float32",
            requires_grad=True,
        )
    )
    uses.append(
        ParameterUse(name="frozen", slots=(("b0", "f", (0,)),), shape=(99,), dtype="float32", requires_grad=False)
    )
    uses.append(ParameterUse(name="unused", slots=(("x", "w", ()),), shape=(3,), dtype="float32", requires_grad=True))
    blocks = tuple(f"b{k}" for k in range(num_layers))
    splits = []
    for degree in degrees:
        shared = [ParameterSplit(name=f"w{k}", dim=0, factors=((5, False), (2, True))) for k in range(num_layers)]
        if tied_size % degree == 0:
            shared.append(ParameterSplit(name="tied", dim=0, factors=((tied_size, True),)))
        splits.append(TensorSplit(degree=degree, parameters=tuple(shared)))
    return ModuleMap(step="training_step", blocks=blocks, cuts=(), parameters=tuple(uses), splits=tuple(splits))


def test_a_rank_knows_its_place():
    mesh = make_mesh(make_plan([2, 4]), 3, make_map(2))
    assert (mesh.stage, mesh.replica, mesh.peer_index, mesh.peers) == (1, 0, 1, (2, 3, 4, 5))
    assert mesh.is_last
    assert [item.name for item in mesh.held] == ["w1", "unused"]


def test_a_rank_has_two_coordinates_within_its_stage():
    plan = make_plan([1, 2], tensor=[2, 3])
    mesh = make_mesh(plan, 6, make_map(2))
    assert (mesh.stage, mesh.peer_index, mesh.tensor_index) == (1, 1, 1)
    assert (mesh.peers, mesh.tensor_peers) == ((3, 6), (5, 6, 7))
    assert stage_ranks(plan, 1, 2) == (4, 7)
    assert tensor_ranks(plan, 0, 0) == (0, 1)


def test_owners_are_the_same_for_all_tensor_parallel_indices():
    plan, module_map = make_plan([2], tensor=2, zero=1), make_map(1)
    owned = [{item.name for item in make_mesh(plan, rank, module_map).owned} for rank in range(4)]
    assert owned[0] == owned[1]
    assert owned[2] == owned[3]
    assert owned[0] | owned[2] == {"w0", "tied", "frozen", "unused"}


def test_zero_1_owners_cover_every_trained_parameter_once():
    plan, module_map = make_plan([2, 2], zero=(1, 0)), make_map(2)
    owned = [{item.name for item in make_mesh(plan, rank, module_map).owned} for rank in range(4)]
    assert owned[0] | owned[1] == {"w0", "tied", "frozen"}
    assert owned[0] & owned[1] == set()
    assert owned[2] == owned[3] == {"w1", "unused"}
    assert not make_mesh(plan, 2, module_map).is_sharded


def test_a_rank_keeps_its_stages_values_or_under_zero_3_those_it_owns():
    module_map = make_map(2)
    held = {item.name for item in make_mesh(make_plan([2, 2]), 0, module_map).held}
    assert names_with_values(make_plan([2, 2], zero=2), module_map, 0) == held
    shares = [names_with_values(make_plan([2, 2], zero=[3, 0]), module_map, rank) for rank in (0, 1)]
    assert shares[0] | shares[1] == held
    assert not shares[0] & shares[1]
    assert names_with_values(make_plan([1, 1], zero=3), module_map, 0) == held


def test_shard_groups_are_neighbours_and_own_alike():
    plan, module_map = make_plan([4, 1], tensor=[2, 1], zero=[1, 0], shard=[2, None]), make_map(2)
    meshes = [make_mesh(plan, rank, module_map) for rank in range(8)]
    assert [mesh.shard_peers for mesh in meshes[:3]] == [(0, 2), (1, 3), (0, 2)]
    assert meshes[5].shard_peers == (5, 7)
    assert [mesh.replicate_peers for mesh in meshes[::2]] == [(0, 4), (2, 6), (0, 4), (2, 6)]
    assert [mesh.shard_index for mesh in meshes] == [0, 0, 1, 1, 0, 0, 1, 1]
    owned = [{item.name for item in mesh.owned} for mesh in meshes]
    assert owned[0] == owned[1] == owned[4] == owned[5] != owned[2] == owned[6]
    assert owned[0] | owned[2] == {"w0", "tied", "frozen"}
    groups = process_groups(plan, module_map)
    assert {(0, 2), (4, 6), (1, 3), (5, 7), (0, 4), (2, 6), (1, 5), (3, 7), (0, 2, 4, 6)} <= set(groups)


def test_without_groups_all_peers_are_one():
    mesh = make_mesh(make_plan([4], zero=3), 2, make_map(1))
    assert (mesh.shard_peers, mesh.shard_index, mesh.replicate_peers) == (mesh.peers, 2, (2,))


def test_the_owners_of_other_groups_are_told_of_tied_gradients():
    plan, module_map = make_plan([4, 2], zero=[2, 1], shard=[2, None]), make_map(2, tied=(0, 1))
    tied = next(item for item in held_parameters(plan, module_map) if item.name == "tied")
    assert tied_groups(plan, tied) == ((tied.owner(0), 4 + tied.owner(1)),)
    assert [needs_spreading(plan, tied, stage) for stage in (0, 1)] == [True, False]
    shares = [names_with_values(make_plan([4], zero=3, shard=[2]), make_map(2), rank) for rank in range(4)]
    assert shares[:2] == shares[2:]
    assert shares[0] != shares[1]


def test_tied_groups_pair_equal_data_indices_where_nothing_is_sharded():
    plan, module_map = make_plan([2, 2]), make_map(2, tied=(0, 1))
    tied = next(item for item in held_parameters(plan, module_map) if item.name == "tied")
    assert tied.stages == (0, 1)
    assert tied_groups(plan, tied) == ((0, 2), (1, 3))
    assert not needs_spreading(plan, tied, 0)


def test_tied_groups_let_one_rank_speak_otherwise():
    module_map = make_map(2, tied=(0, 1))
    for plan in (make_plan([2, 1]), make_plan([2, 2], zero=1), make_plan([2, 2], zero=(0, 1))):
        tied = next(item for item in held_parameters(plan, module_map) if item.name == "tied")
        (group,) = tied_groups(plan, tied)
        assert [plan.stage_of(rank) for rank in group] == [0, 1]
        speaks = [plan.stages[s].devices[tied.owner(s)] for s in tied.stages]
        assert sorted(speaks) == list(group)
        assert needs_spreading(plan, tied, 0) == (plan.stages[0].zero_stage == ZeroStage.NONE)


def tied_of(plan):
    return next(item for item in held_parameters(plan, make_map(2, tied=(0, 1))) if item.name == "tied")


def test_tied_groups_pair_equal_tensor_indices_where_the_degrees_agree():
    plan = make_plan([2, 2], tensor=2)
    assert tied_groups(plan, tied_of(plan)) == ((0, 4), (2, 6), (1, 5), (3, 7))
    plan = make_plan([2, 1], tensor=2)
    assert tied_groups(plan, tied_of(plan)) == ((0, 4), (1, 5))
    assert not sums_wholes(plan, tied_of(plan))
    assert needs_spreading(plan, tied_of(plan), 0)


def test_tied_groups_hold_all_tensor_indices_where_the_degrees_differ():
    plan = make_plan([2, 2], tensor=[2, 1])
    assert sums_wholes(plan, tied_of(plan))
    assert tied_groups(plan, tied_of(plan)) == ((0, 1, 4), (2, 3, 5))
    plan = make_plan([1, 2], tensor=[2, 1])
    assert tied_groups(plan, tied_of(plan)) == ((0, 1, 2),)
    assert needs_spreading(plan, tied_of(plan), 1)


def test_groups_are_the_same_whoever_asks_and_hold_what_is_needed():
    plan, module_map = make_plan([2, 4]), make_map(2, tied=(0, 1))
    groups = process_groups(plan, module_map)
    assert groups[0] == tuple(range(6))
    assert {(0, 1), (2, 3, 4, 5), (0, 2, 3), (1, 4, 5), (0, 2)} <= set(groups)
    assert len(set(groups)) == len(groups)
    groups = process_groups(make_plan([2, 1], tensor=[2, 1]), module_map)
    assert {(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 4)} <= set(groups)


def test_the_size_of_an_element_is_that_of_torch():
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn):
        assert itemsize(str(dtype).removeprefix("torch.")) == dtype.itemsize
    with pytest.raises(PlanError, match="dtype 'quantised'"):
        itemsize("quantised")


def test_ranks_that_share_rows_are_peers_and_shard_together():
    mesh = StageMesh(
        devices=tuple(range(8)), data_parallel_degree=2, context_parallel_degree=2, tensor_parallel_degree=2
    )
    stage = StagePlan(layers=(0, 1), mesh=mesh, microbatch_size=2, zero_stage=ZeroStage.OPTIMIZER)
    plan = Plan(global_batch_size=16, num_microbatches=4, stages=(stage,))
    uses = tuple(
        ParameterUse(name=f"p{i}", slots=(), shape=(4,), dtype="float32", requires_grad=True) for i in range(4)
    )
    found = make_mesh(plan, 5, ModuleMap(step="s", blocks=("b",), cuts=(), parameters=uses))
    assert (found.peers, found.peer_index, found.tensor_index) == ((1, 3, 5, 7), 2, 1)
    assert (found.tensor_peers, found.row_peers, found.row_index) == ((4, 5), (4, 5, 6, 7), 1)
    assert row_ranks(plan, 0, 0) == (0, 1, 2, 3)
    assert [item.owner(0) for item in found.parameters] == [0, 1, 2, 3]
    assert [item.name for item in found.owned] == ["p2"]
