import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.user_code import Generators, ModuleState, Reach, Surroundings, unchanged
from lightning_mist.tensors import copy_batch


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
    assert list(before.differs(ModuleState(net))) == [("", name)]


def test_nothing_changed():
    net = Net()
    assert list(ModuleState(net).differs(ModuleState(net))) == []
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


# Beside the module

HELD = {"count": 0}
NUMBERS = itertools.count()
ARRAY = np.zeros(2)
CACHE = {}


def numbers():
    yield from itertools.count()


class Counts(nn.Module):
    count = 0

    def __init__(self, kind):
        super().__init__()
        self.kind, self.numbers, self.scale = kind, numbers(), torch.ones(1)

    def training_step(self, batch):
        return self.by_held, self.by_class, self.by_iterator, self.by_generator, self.by_array, self.by_cache

    def by_held(self):
        HELD["count"] += 1
        return HELD["count"]

    def by_class(self):
        Counts.count += 1
        Counts.made = True
        return Counts.count

    def by_iterator(self):
        return next(NUMBERS)

    def by_generator(self):
        return next(self.numbers)

    def by_array(self):
        ARRAY[0] += 1
        return float(ARRAY[0])

    def by_cache(self):
        CACHE.setdefault("table", 7)
        return CACHE["table"]

    def run(self):
        return getattr(self, f"by_{self.kind}")()


def run(around, net):
    with around.run():
        return net.run()


@pytest.mark.parametrize("kind", ["held", "class", "iterator", "generator", "array", "cache"])
def test_every_run_begins_alike_and_nothing_is_left(kind):
    net = Counts(kind)
    around = Surroundings(Reach(net, net.training_step, {}))
    first, second = run(around, net), run(around, net)
    changed = [name for name, _ in around.settle()]
    assert changed == {"held": ["HELD"], "class": ["count"], "iterator": ["NUMBERS"], "array": ["ARRAY"]}.get(kind, [])
    again = [run(around, net), run(around, net)]
    around.release()
    assert again == [first, first]
    assert (first == second) is (kind == "cache")
    assert "made" not in vars(Counts)
    assert net.run() == first
    if kind == "class":
        del Counts.made


def test_what_answers_for_a_layer_meanwhile_is_not_put_back():
    class Layer(nn.Module):
        def forward(self, x):
            return x

    class Layered(Counts):
        def by_held(self):
            return super().by_held(), self.layer.forward(ARRAY)

    net = Layered("held")
    net.layer = Layer()
    around = Surroundings(Reach(net, net.training_step, {}))
    run(around, net)
    assert [name for name, _ in around.settle()] == ["HELD"]
    vars(net.layer)["forward"] = partial(copy_batch)
    run(around, net)
    assert "forward" in vars(net.layer)
    around.release()


def test_one_run_alone_counts_as_a_change():
    net = Counts("held")
    around = Surroundings(Reach(net, net.training_step, {}))
    run(around, net)
    assert [name for name, _ in around.settle()] == ["HELD"]
    around.release()
