import copy

import pytest
import torch
from torch import nn

from lightning_mist.devices import HostOps
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.plan.stage_settings import ZeroStage
from lightning_mist.runtime.host_memory import HostPool
from lightning_mist.runtime.parameters.unit_shards import UnitShards
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.stage_units import ShardUnit
from tests.integration.parity import make_plan, map_of
from tests.memory_transport import InMemoryWorld, drive
from tests.zoo import make

RANKS = 2


class World:
    """The ranks of one stage, each with its copy of a small module, units given by parts of names."""

    def __init__(self, module, batch, units):
        module_map = map_of(module, batch, even_shards=False)
        plan = make_plan([len(module_map.blocks)], degrees=[RANKS], zero=ZeroStage.PARAMETERS)
        world = InMemoryWorld(RANKS)
        self.modules = [copy.deepcopy(module) for _ in range(RANKS)]
        self.meshes = [make_mesh(plan, rank, module_map) for rank in range(RANKS)]
        names = [name for name, _ in module.named_parameters()]
        self.units = {
            (0, unit): ShardUnit(unit=unit, names=tuple(n for n in names if any(p in n for p in parts)), reduced=())
            for unit, parts in units.items()
        }
        self.shards = [
            UnitShards(mesh, dict(module.named_parameters()), self.units, transport)
            for mesh, module, transport in zip(self.meshes, self.modules, world.transports, strict=True)
        ]

    def each(self, *calls):
        """Every rank makes these calls, one after the other."""

        def run(shards):
            for name, *arguments in calls:
                getattr(shards, name)(*arguments)
            return
            yield

        drive([run(shards) for shards in self.shards])


@pytest.fixture
def world():
    module, make_batch = make("nano")
    units = {HEAD: ["wte", "wpe"], 0: ["h.0."], 1: ["h.1."], 2: ["h.2."], 3: ["h.3."], TAIL: ["ln_f", "wte"]}
    found = World(module, make_batch(2), units)
    assert {name for unit in found.units.values() for name in unit.names} == set(dict(module.named_parameters()))
    found.original = module
    return found


def bytes_of(parameters):
    storages = {parameter.untyped_storage()._cdata: parameter.untyped_storage() for parameter in parameters}
    return sum(storage.nbytes() for storage in storages.values())


def test_only_owners_keep_values(world):
    world.each(("engage",))
    for module, shards in zip(world.modules, world.shards, strict=True):
        for name, parameter in module.named_parameters():
            expected = dict(world.original.named_parameters())[name]
            assert parameter.shape == expected.shape
            assert torch.isnan(parameter).all() if name in shards.away else torch.equal(parameter, expected)
        one_each = sum(parameter.element_size() for parameter in shards.away.values())
        assert 0 < bytes_of(shards.away.values()) <= one_each
    assert not set(world.shards[0].away) & set(world.shards[1].away)


def test_a_unit_is_whole_while_it_is_unsharded(world):
    expected = dict(world.original.named_parameters())
    world.each(("engage",), ("unshard", (0, 1)), ("ready", (0, 1)))
    for module, shards in zip(world.modules, world.shards, strict=True):
        for name, parameter in module.named_parameters():
            if name in world.units[0, 1].names:
                assert torch.equal(parameter, expected[name])
            elif name in shards.away:
                assert torch.isnan(parameter).all()
    world.each(("reshard", (0, 1)))
    for shards in world.shards:
        assert all(torch.isnan(parameter).all() for parameter in shards.away.values())


def test_what_two_units_use_stays_until_both_are_sharded(world):
    world.each(("engage",), ("unshard", (0, HEAD)), ("unshard", (0, TAIL)), ("ready", (0, HEAD)), ("ready", (0, TAIL)))
    world.each(("reshard", (0, HEAD)))
    (name,) = [name for name in world.units[0, TAIL].names if "wte" in name]
    for module in world.modules:
        assert not torch.isnan(dict(module.named_parameters())[name]).any()
    world.each(("reshard", (0, TAIL)))
    assert sum(torch.isnan(dict(module.named_parameters())[name]).any() for module in world.modules) == RANKS - 1


def test_what_autograd_saved_is_right_again_after_unsharding(world):
    """A graph made of views of a parameter survives its memory, with no complaint about versions."""
    world.each(("engage",), ("unshard", (0, 0)), ("ready", (0, 0)))
    names = [name for name in world.units[0, 0].names if name.endswith("weight") and "ln" not in name]
    inputs, outputs = [], []
    for module in world.modules:
        weight = dict(module.named_parameters())[names[0]]
        inputs.append(torch.randn(3, weight.shape[1], requires_grad=True))
        outputs.append(nn.functional.linear(inputs[-1], weight).tanh().sum())
    world.each(("reshard", (0, 0)), ("unshard", (0, 0)), ("ready", (0, 0)))
    weight = dict(world.original.named_parameters())[names[0]].detach()
    for x, output in zip(inputs, outputs, strict=True):
        output.backward()
        again = x.detach().clone().requires_grad_()
        nn.functional.linear(again, weight).tanh().sum().backward()
        assert torch.equal(x.grad, again.grad)


def test_owners_values_travel_as_they_are_now(world):
    world.each(("engage",))
    with torch.no_grad():
        for module, shards in zip(world.modules, world.shards, strict=True):
            for name, parameter in module.named_parameters():
                if name not in shards.away:
                    parameter.add_(1.0)
    world.each(("unshard", (0, 2)), ("ready", (0, 2)))
    for module in world.modules:
        for name in world.units[0, 2].names:
            expected = dict(world.original.named_parameters())[name] + 1.0
            assert torch.equal(dict(module.named_parameters())[name], expected)


def test_disengaged_owners_have_ordinary_parameters(world):
    world.each(("engage",), ("disengage",))
    for module, shards in zip(world.modules, world.shards, strict=True):
        owned = {name: p for name, p in module.named_parameters() if name not in shards.away}
        assert bytes_of(owned.values()) == sum(p.numel() * p.element_size() for p in owned.values())
        assert len({p.untyped_storage()._cdata for p in owned.values()}) == len(owned)
        for name, parameter in owned.items():
            assert torch.equal(parameter, dict(world.original.named_parameters())[name])


def test_parameters_keep_their_memory_format():
    """Dense strides other than contiguous ones, on the owner and elsewhere."""
    module, make_batch = make("batch_norm")
    module.to(memory_format=torch.channels_last)
    world = World(module, make_batch(2), {HEAD: [""]})
    strides = {name: parameter.stride() for name, parameter in module.named_parameters()}
    assert any(not parameter.is_contiguous() for parameter in module.parameters())
    world.each(("engage",), ("unshard", (0, HEAD)), ("ready", (0, HEAD)))
    for copied in world.modules:
        for name, parameter in copied.named_parameters():
            assert parameter.stride() == strides[name]
            assert torch.equal(parameter, dict(module.named_parameters())[name])


class _Odd(nn.Module):
    """Layers of three by three, and biases of three."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(3))

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_parameters_begin_where_kernels_want_them():
    world = World(_Odd(), {"x": torch.randn(2, 3)}, {HEAD: [""]})
    world.each(("engage",), ("unshard", (0, HEAD)), ("ready", (0, HEAD)))
    for copied in world.modules:
        assert all(parameter.data_ptr() % 16 == 0 for parameter in copied.parameters())


def test_an_abandoned_batch_leaves_everything_sharded(world):
    world.each(("engage",), ("unshard", (0, 1)), ("unshard", (0, 2)), ("ready", (0, 1)), ("abandon",))
    for shards in world.shards:
        sharded = [name for name in shards.away if name in world.units[0, 1].names]
        assert all(torch.isnan(shards.away[name]).all() for name in sharded)
    world.each(("unshard", (0, 2)), ("ready", (0, 2)))
    for module in world.modules:
        for name in world.units[0, 2].names:
            assert torch.equal(dict(module.named_parameters())[name], dict(world.original.named_parameters())[name])


class Late:
    """Copies to host memory that run when they are waited for."""

    ops = HostOps()

    def load(self, targets, sources, after=()):
        torch._foreach_copy_(targets, sources)

    def store(self, targets, sources):
        return lambda: torch._foreach_copy_(targets, sources)

    def wait(self, event):
        if event is not None:
            event()


def test_an_abandoned_batch_frees_nothing_that_is_still_copied():
    module, make_batch = make("nano")
    module_map = map_of(module, make_batch(2))
    mesh = make_mesh(make_plan([4]), 0, module_map)
    named = dict(module.named_parameters())
    names = tuple(name for name in named if "h.1." in name)
    units = {(0, 1): ShardUnit(unit=1, names=names, reduced=names)}
    shards = UnitShards(mesh, named, units, None, names, Late(), HostPool(Late.ops))
    shards.engage()
    shards.fetch((0, 1))
    shards.fetched((0, 1))
    with torch.no_grad():
        for name in names:
            named[name].fill_(2.0)
    shards.store((0, 1))
    shards.unshard((0, 1))
    shards.abandon()
    assert all(bool((value == 2.0).all()) for value in shards.home_values().values())
