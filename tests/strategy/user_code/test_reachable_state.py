import itertools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_mist.model.user_code.reach import Reach
from lightning_mist.strategy.user_code.reachable_state import Survey, changed

HELD = SimpleNamespace(value=None)


class Meter:
    def __init__(self):
        self.seen = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.held, self.seen, self.layer = None, 0, nn.Linear(1, 1)

    def forward(self):
        return self.held, HELD, self.seen


def survey_of(net):
    return Survey(Reach(net, net.forward, {}))


def generator():
    yield from range(10)


CHANGES = {
    "number": (1, lambda net: setattr(net, "held", 2)),
    "list": ([1], lambda net: net.held.append(2)),
    "deque": (deque([1]), lambda net: net.held.append(2)),
    "dictionary": ({"a": 1}, lambda net: net.held.update(a=2)),
    "set": ({1}, lambda net: net.held.add(2)),
    "pair": ((1, [2]), lambda net: net.held[1].append(2)),
    "object": (Meter(), lambda net: setattr(net.held, "seen", 1)),
    "tensor": (torch.zeros(2), lambda net: net.held.add_(1)),
    "array": (np.zeros(2), lambda net: net.held.fill(1)),
    "large array": (np.zeros(100_000), lambda net: net.held.fill(1)),
    "python": (random.Random(1), lambda net: net.held.random()),
    "numpy": (np.random.default_rng(1), lambda net: net.held.random()),
    "numpy's older": (np.random.RandomState(1), lambda net: net.held.rand()),
    "torch": (torch.Generator(), lambda net: torch.rand(1, generator=net.held)),
    "count": (itertools.count(), lambda net: next(net.held)),
    "items": (iter([1, 2]), lambda net: next(net.held)),
    "generator": (generator(), lambda net: next(net.held)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_show_between_two_looks(name):
    net = Net()
    net.held, change = CHANGES[name]
    survey = survey_of(net)
    before = survey.look()
    assert changed(before, survey.look()) == []
    change(net)
    assert changed(before, survey.look()) == ["the attribute held of the module"]


@pytest.mark.parametrize("value", [1, 1.5, "a", None, float("nan"), [1, 2], {"held": 1}, np.ones(2), torch.ones(2)])
def test_equal_values_are_equal_on_ranks(value):
    one, other = Net(), Net()
    one.held = value
    other.held = value.clone() if isinstance(value, torch.Tensor) else value
    assert survey_of(one).digest() == survey_of(other).digest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        ([1], [2]),
        ({"held": 1}, {"held": 2}),
        (torch.ones(2), torch.zeros(2)),
        (np.ones(1), np.zeros(1)),
    ],
)
def test_other_values_differ_on_ranks(one, other):
    nets = Net(), Net()
    nets[0].held, nets[1].held = one, other
    first, second = (survey_of(net).details() for net in nets)
    assert [name for name in first if first[name] != second[name]] == ["the attribute held of the module"]


def test_what_code_does_not_name_may_differ_on_ranks():
    nets = Net(), Net()
    for number, net in enumerate(nets):
        net.held, net.path = {"folder": number}, number
    assert survey_of(nets[0]).digest() == survey_of(nets[1]).digest()


def test_tensors_are_summed_when_they_have_changed():
    net = Net()
    net.held = torch.zeros(2)
    survey = survey_of(net)
    first = survey.digest()
    net.held.add_(1)
    assert survey.digest() != first
