import pytest
import torch
from torch import nn

from lightning_mist.runtime import gather
from lightning_mist.runtime.gather import ParameterGatherer
from lightning_mist.runtime.memory_transport import InMemoryWorld, drive
from lightning_mist.runtime.mesh import make_mesh
from tests.runtime.test_mesh import make_map, make_plan

SHAPES = {"w0": (10, 1), "w1": (10, 2), "w2": (10, 3), "tied": (7,), "frozen": (99,), "unused": (3,)}


def _parameters(plan, rank, module_map):
    held = {item.name for item in make_mesh(plan, rank, module_map).held}
    values = {
        name: torch.full(shape, float(i)).to(torch.float64 if name == "w1" else torch.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    hollow = {name: torch.zeros((), dtype=value.dtype).expand(value.shape) for name, value in values.items()}
    return {n: nn.Parameter(v if n in held else hollow[n]) for n, v in values.items()}


@pytest.mark.parametrize("degrees", [[1, 1, 1], [2, 1, 2], [3]])
@pytest.mark.parametrize("destination", [None, 0, 2])
@pytest.mark.parametrize("capacity", [1, 2**20])
def test_every_value_arrives_once_and_in_order(degrees, destination, capacity, monkeypatch):
    monkeypatch.setattr(gather, "BUCKET_BYTES", capacity)
    plan = make_plan(degrees, zero=1)
    module_map = make_map(3, tied=(0, 2))
    if len(degrees) == 1:
        plan = make_plan([3])
    world = InMemoryWorld(plan.world_size)
    got = [[] for _ in range(plan.world_size)]
    drive(
        [
            ParameterGatherer(plan, rank, _parameters(plan, rank, module_map), module_map, transport).run(
                lambda name, value, rank=rank: got[rank].append((name, value.clone())), destination=destination
            )
            for rank, transport in enumerate(world.transports)
        ]
    )
    order = [use.name for use in module_map.parameters]
    for rank, values in enumerate(got):
        if destination not in (None, rank):
            assert values == []
            continue
        assert [name for name, _ in values] == order
        for name, value in values:
            assert tuple(value.shape) == SHAPES[name]
            assert value.unique().tolist() == [float(list(SHAPES).index(name))]
    assert world.pending == ()
