import random

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.user_code.module_state import Generators, ModuleState, unchanged


class Meter:
    def __init__(self):
        self.values = {"seen": 0}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.number, self.items, self.pair = 1, [1, {"a": 2}], (1, [2])
        self.meter, self.cached, self.tensor = Meter(), None, torch.zeros(2)
        self.generator = torch.Generator().manual_seed(0)


CHANGES = {
    "number": lambda net: setattr(net, "number", 2),
    "items": lambda net: net.items[1].update(b=3),
    "pair": lambda net: net.pair[1].append(3),
    "meter": lambda net: net.meter.values.update(seen=1),
    "cached": lambda net: setattr(net, "cached", torch.ones(1)),
    "tensor": lambda net: net.tensor.add_(1),
    "generator": lambda net: torch.rand(1, generator=net.generator),
    "new": lambda net: setattr(net, "new", 1),
    "training": lambda net: net.__dict__.__setitem__("training", False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_named(name):
    net = Net()
    before = ModuleState(net)
    CHANGES[name](net)
    assert list(before.changed_attributes(ModuleState(net))) == [("", name)]


def test_nothing_changed():
    net = Net()
    assert list(ModuleState(net).changed_attributes(ModuleState(net))) == []
    assert list(ModuleState(net).changed_buffers(ModuleState(net))) == []


def test_everything_is_put_back():
    net = Net()
    parameters, inner = dict(net.named_parameters()), net.inner
    state = torch.get_rng_state()
    with unchanged(net):
        for name, change in CHANGES.items():
            if name != "generator":
                change(net)
        net.inner(torch.randn(4, 2))
        net.inner = nn.Linear(2, 2)
        net.register_buffer("late", torch.zeros(1))
        inner._parameters["weight"] = nn.Parameter(torch.ones(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert (net.number, net.items, net.pair, net.meter.values) == (1, [1, {"a": 2}], (1, [2]), {"seen": 0})
    assert net.cached is None
    assert net.training
    assert not hasattr(net, "new")
    assert not hasattr(net, "late")
    assert net.tensor.sum() == 0
    assert net.inner is inner
    assert int(inner.num_batches_tracked) == 0
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())


def test_written_and_replaced_buffers_are_named():
    net = Net()
    before = ModuleState(net)
    net.inner.running_mean.add_(1)
    net.inner.running_var = torch.zeros(2)
    assert list(before.changed_buffers(ModuleState(net))) == ["inner.running_mean", "inner.running_var"]


def test_generators():
    before = Generators()
    expected = torch.rand(1), random.random(), np.random.rand()
    assert list(before.outside_torch(Generators())) == ["Python's random module", "numpy's global generator"]
    before.restore()
    assert list(before.outside_torch(Generators())) == []
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


def test_data_that_was_set_is_noticed_and_put_back():
    net = Net()
    buffer = net.inner.running_mean
    before, state = buffer.clone(), ModuleState(net, with_contents=True)
    memory = buffer.data_ptr()
    with FakeTensorMode():
        fake = torch.ones(7)
    buffer.data = fake
    assert list(state.changed_buffers(ModuleState(net))) == ["inner.running_mean"]
    state.restore()
    assert buffer.equal(before)
    assert buffer.data_ptr() == memory
