import pytest
import torch
from torch import nn

from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.parameters import gather
from lightning_mist.runtime.parameters.gather import BufferSync, ParameterGatherer
from lightning_mist.runtime.parameters.parameter_parts import parts_of
from tests.memory_transport import InMemoryWorld, drive
from tests.plan.test_mesh import make_map, make_plan
from tests.runtime.parameters.test_parameter_parts import split_map, split_plan

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


@pytest.mark.parametrize("degrees", [[(1, 2), (1, 1), (1, 2)], [(2, 2), (1, 1), (2, 2)], [(1, 1), (1, 2), (2, 1)]])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("destination", [None, 0, 3])
@pytest.mark.parametrize("capacity", [1, 2**20])
def test_values_are_put_together_from_parts(degrees, zero, destination, capacity, monkeypatch):
    monkeypatch.setattr(gather, "BUCKET_BYTES", capacity)
    plan, module_map = split_plan(degrees, zero=zero), split_map(3, tied=(0, 2))
    values = {use.name: torch.randn(use.shape) for use in module_map.parameters}
    world = InMemoryWorld(plan.world_size)
    got = [{} for _ in range(plan.world_size)]
    runs = []
    for rank, transport in enumerate(world.transports):
        held = {item.name for item in make_mesh(plan, rank, module_map).held}
        parts = parts_of(plan, rank, module_map)
        parameters = {
            name: nn.Parameter(parts[name].take(value) if name in parts else value)
            if name in held
            else nn.Parameter(torch.zeros(()).expand(value.shape))
            for name, value in values.items()
        }
        gatherer = ParameterGatherer(plan, rank, parameters, module_map, transport)
        sink = lambda name, value, rank=rank: got[rank].update({name: value.clone()})  # noqa: E731
        runs.append(gatherer.run(sink, destination=destination))
    drive(runs)
    for rank, found in enumerate(got):
        if destination not in (None, rank):
            assert found == {}
            continue
        assert list(found) == list(values)
        assert all(torch.equal(found[name], value) for name, value in values.items())
    assert world.pending == ()


def test_strides_do_not_travel():
    """The receiver's parameter is hollow and knows no strides."""
    plan, module_map = make_plan([1, 1]), make_map(2)
    value = torch.arange(20.0).reshape(2, 10).t()
    parameters = [_parameters(plan, rank, module_map) for rank in range(2)]
    parameters[1]["w1"] = nn.Parameter(value)
    parameters[0]["w1"] = nn.Parameter(torch.zeros(()).expand(10, 2))
    world, got = InMemoryWorld(2), {}
    drive(
        [
            ParameterGatherer(plan, rank, parameters[rank], module_map, transport).run(
                lambda name, found, rank=rank: got.update({(rank, name): found.clone()})
            )
            for rank, transport in enumerate(world.transports)
        ]
    )
    assert torch.equal(got[0, "w1"], value)
    assert torch.equal(got[1, "w1"], value)


class Net(nn.Module):
    """Buffers of several types and forms, which differ by rank."""

    def __init__(self, rank):
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.inner.running_mean += rank
        self.inner.num_batches_tracked += rank
        self.register_buffer("flag", torch.tensor([rank == 0]), persistent=False)
        self.register_buffer("sizes", torch.full((1, 3), float(rank), dtype=torch.bfloat16))
        self.register_buffer("across", torch.full((2, 3), float(rank), dtype=torch.float64).t())
        self.register_buffer("expanded", torch.full((1, 1), float(rank)).expand(5, 2))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("none", None)


def values(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def make(size=3, **options):
    modules = [Net(rank) for rank in range(size)]
    world = InMemoryWorld(size)
    syncs = [
        BufferSync(module, transport, **options) for module, transport in zip(modules, world.transports, strict=True)
    ]
    return modules, syncs


def forward(syncs, *, evaluates=False):
    """What a forward does on every rank."""
    drive([sync.before_forward() for sync in syncs])
    for sync in syncs:
        with torch.set_grad_enabled(not evaluates):
            sync.after_forward()


def disturb(modules):
    for rank, module in enumerate(modules):
        module.sizes += rank + 1


def are_alike(modules):
    return len({float(module.sizes[0, 0]) for module in modules}) == 1


def test_every_buffer_is_that_of_rank_zero():
    modules, syncs = make()
    before, versions = values(modules[0]), [modules[1].sizes._version]
    forward(syncs)
    for module in modules:
        torch.testing.assert_close(values(module), before, rtol=0, atol=0)
    assert [modules[1].sizes._version] == versions


def test_they_are_alike_before_forwards_that_follow_one_with_averaged_gradients():
    """As DistributedDataParallel: not after an evaluation, and not after a batch that is only accumulated."""
    modules, syncs = make()
    forward(syncs)
    disturb(modules)
    forward(syncs, evaluates=True)
    assert are_alike(modules)
    disturb(modules)
    forward(syncs)
    assert not are_alike(modules)
    forward(syncs)
    assert are_alike(modules)
    with syncs[0].accumulating(), syncs[1].accumulating(), syncs[2].accumulating():
        forward(syncs)
    disturb(modules)
    forward(syncs)
    assert not are_alike(modules)
    forward(syncs)
    assert are_alike(modules)


@pytest.mark.parametrize("options", [{"is_enabled": False}, {}])
def test_buffers_stay_as_they_are_where_that_is_asked_for(options):
    modules, syncs = make(**options)
    for module in modules:
        module._ddp_params_and_buffers_to_ignore = ["sizes"]
    forward(syncs)
    assert not are_alike(modules)
    assert bool(modules[1].flag) == bool(options == {})


def test_replaced_buffers_are_found():
    modules, syncs = make()
    forward(syncs)
    for rank, module in enumerate(modules):
        module.sizes = torch.full((4,), float(rank))
    forward(syncs)
    assert [module.sizes.tolist() for module in modules] == [[0.0] * 4] * 3
