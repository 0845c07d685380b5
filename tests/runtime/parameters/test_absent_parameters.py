import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.runtime.parameters.absent_parameters import (
    AbsentParameter,
    at_work,
    held_at,
    make_absent,
    make_present,
    works,
)
from tests.plan.test_mesh import make_map, make_plan

USES = {
    "norm": lambda net: net.weight.norm(),
    "data": lambda net: net.weight.data,
    "clamp_": lambda net: net.weight.clamp_(-1, 1),
    "data =": lambda net: setattr(net.weight, "data", torch.zeros(2, 3)),
    "grad": lambda net: net.weight.grad,
    "linear": lambda net: net(torch.zeros(1, 3)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.dumps(net.weight),
    "stack": lambda net: torch.stack([net.weight, net.weight]),
    "detach": lambda net: torch.save(net.state_dict(), io.BytesIO()),
    "histc": lambda net: torch.histc(net.weight),
    "copy_": lambda net: torch.zeros(2, 3).copy_(net.weight),
    "register_hook": lambda net: net.weight.register_hook(print),
    "_foreach_norm": lambda net: torch._foreach_norm([net.weight]),
}


def absent():
    net = nn.Linear(3, 2)
    for parameter in net.parameters():
        parameter.data = torch.full((), float("nan")).expand(parameter.shape)
    make_absent(dict(net.named_parameters()), lambda name: f"on rank 1, where {name} is")
    return net


@pytest.mark.parametrize("name", USES)
def test_whoever_uses_values_is_told_where_they_are(name):
    with pytest.raises(PlanError, match=rf"^{name} of weight while it is trained: its values are on rank 1"):
        USES[name](absent())


def test_forms_may_be_asked_for():
    net = absent()
    weight = net.weight
    assert (weight.shape, weight.numel(), weight.dtype, weight.device.type) == ((2, 3), 6, torch.float32, "cpu")
    assert (weight.requires_grad, weight.is_leaf, weight.ndim, weight.size(1), len(weight)) == (True, True, 2, 3, 2)
    assert {weight: 1}[weight] == 1
    assert isinstance(weight, nn.Parameter)
    assert "weight of shape (2, 3), whose values are on rank 1" in repr(weight)
    net.zero_grad()
    net.requires_grad_(False)
    assert not weight.requires_grad


def test_the_engine_may_use_them_in_every_way_and_gives_them_back():
    net = absent()
    with at_work():
        assert net.weight.isnan().all()
        assert copy.deepcopy(net.weight).isnan().all()
    assert works(lambda: net.weight.isnan().all())()
    assert type(net.weight) is AbsentParameter
    make_present(net.parameters())
    assert type(net.weight) is nn.Parameter
    assert vars(net.weight) == {}
    assert net(torch.zeros(1, 3)).isnan().all()


def test_where_they_are_is_told_by_stage():
    plan, module_map = make_plan([2, 1]), make_map(3)
    assert held_at(plan, module_map, "w0") == "on ranks 0-1 (stage 0 of 2)"
    assert held_at(plan, module_map, "w2") == "on rank 2 (stage 1 of 2)"
