"""No plan with equal stages takes less than what its layers take to compute."""

from dataclasses import replace

import pytest

from lightning_mist.cost import MixedCostModel, seconds_with
from lightning_mist.hardware import MixedCluster
from lightning_mist.tuner.families import Grid
from lightning_mist.tuner.grid_floors import GridFloors
from lightning_mist.tuner.space import SearchSpace, Shape, apply
from tests.specs import cluster, profile, spec
from tests.tuner.test_uniform import DEVICES, GRID, MODEL, NETWORK, ROWS, _plans

SPACE = apply(SearchSpace(), NETWORK, DEVICES, ROWS * DEVICES, devices_per_node=DEVICES)


def grid_of(plan):
    mesh = plan.stages[0].mesh
    shape = Shape(mesh.data_parallel_degree, mesh.tensor_parallel_degree, mesh.sequence_parallel)
    return Grid(num_stages=plan.num_groups, num_microbatches=plan.num_microbatches, shape=shape)


def test_every_plan_takes_as_long_as_its_layers():
    floors, near = GridFloors(MODEL, SPACE), []
    for plan in _plans(replace(GRID, zero_stages=(0, 1, 3))):
        each = [plan.stages[index].checkpointing.layers for index in range(plan.num_stages)]
        of_group = min(sum(each[index] for index in plan.chunks(group)) for group in range(plan.num_groups))
        seconds = seconds_with(MODEL, plan)
        floor = floors.of(grid_of(plan), of_group)
        assert floors.of(grid_of(plan)) <= floor <= seconds * (1 + 1e-12)
        near.append(floor / seconds)
    assert max(near) > 0.9


def test_floors_of_few_chunks_are_not_those_of_many():
    few, many = (replace(SPACE, search=replace(SPACE.search, chunks=chunks)) for chunks in ((2,), (2, 4)))
    kept, grid = {}, Grid(num_stages=2, num_microbatches=2, shape=Shape(1, 1, False))
    alone = [GridFloors(MODEL, space).of(grid) for space in (few, many)]
    assert [GridFloors(MODEL, space, kept).of(grid) for space in (few, many)] == alone
    assert alone[1] < alone[0]


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (1, 1, 0, 0)])
def test_on_unlike_devices_a_stage_takes_as_long_as_where_it_lies(order):
    slow = profile(flops_per_second=1e9)
    machine = MixedCluster(parts=(cluster(2), cluster(2, memory=2 * 10**9)))
    network = spec(8)
    kinds = ((profile(), profile()), (profile(), slow), (slow, slow))
    grid = Grid(num_stages=4, num_microbatches=4, shape=Shape(1, 1, False), parts=order)
    space = apply(SearchSpace(), network, 4, 16, devices_per_node=2)
    fast, found, slowest = (GridFloors(MixedCostModel(network, item, machine), space).of(grid) for item in kinds)
    assert 2 * fast < found < slowest
