import pytest
import torch
from torch import nn

from lightning_mist.model.cuts.compiled_parts import compiled_exclusions


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x):
        return self.inner(x)


def inside():
    net = Net()
    net.inner[0] = torch.compile(net.inner[0], backend="eager")
    return net


def in_place():
    net = Net()
    net.inner.compile(backend="eager")
    return net


def bound():
    net = Net()
    net.forward = torch.compile(net.forward, backend="eager")
    return net


def marked():
    net = Net()
    net._compiler_ctx = {"compiler": "dynamo"}
    return net


class Method(Net):
    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


@torch.compile(backend="eager")
def double(x):
    return 2 * x


class Calls(Net):
    def forward(self, x):
        return double(super().forward(x))


EVERYWHERE = ["pipeline", "tensor", "sequence"]
INSIDE = ["microbatches", "sharded_parameters"]


@pytest.mark.parametrize(
    ("make", "place", "features"),
    [
        (inside, "inner.0", EVERYWHERE + INSIDE),
        (in_place, "inner", EVERYWHERE),
        (bound, "the module.forward", EVERYWHERE + INSIDE),
        (marked, "the module", EVERYWHERE),
        (lambda: torch.compile(Net(), backend="eager"), "the module", EVERYWHERE),
        (Method, "Method.forward", EVERYWHERE + INSIDE),
        (Calls, "double, which Calls.forward calls,", EVERYWHERE + INSIDE),
    ],
)
def test_what_is_compiled_is_named(make, place, features):
    found = compiled_exclusions(make(), ("inner.0", "inner.1"))
    assert [item.feature for item in found] == features
    assert found[0].reason.startswith(f"{place} is compiled by torch.compile")


def test_what_is_not_rules_out_nothing():
    assert compiled_exclusions(Net()) == ()
