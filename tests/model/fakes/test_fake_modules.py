import logging

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.model.fakes.fake_modules import (
    address_of,
    fake_like,
    fake_parameters,
    quiet_fakes,
    state_of,
    storage_of,
)
from lightning_mist.without_values import become


def mode():
    return FakeTensorMode(allow_non_fake_inputs=True)


def test_every_slot_has_its_own_fake_of_the_same_form():
    module = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3, bias=False), "c": nn.GRU(2, 3)})
    module.b.weight = module.a.weight
    module.a.weight.data = torch.randn(2, 3).t()
    module.c.bias_ih_l0.data = torch.zeros(()).expand(9)
    module.a.bias.requires_grad_(False)
    slots = fake_parameters(module, mode())
    fakes = {slot: child._parameters[slot[1]] for slot in slots.values() for child in [module.get_submodule(slot[0])]}
    assert len(fakes) == 3 + 4
    assert all(isinstance(fake, nn.Parameter) and isinstance(fake, FakeTensor) for fake in fakes.values())
    assert fakes["a", "weight"] is not fakes["b", "weight"]
    assert fakes["a", "weight"].stride() == (1, 3)
    assert fakes["c", "bias_ih_l0"].stride() == (1,)
    assert not fakes["a", "bias"].requires_grad
    assert all(isinstance(weight, FakeTensor) for weight in module.c._flat_weights)
    assert all(slots[id(fake)] == slot for slot, fake in fakes.items())


def test_a_tensor_becomes_a_fake_and_itself_again():
    fakes = mode()
    with fakes:
        source = torch.empty(2)
    target = torch.ones(2)
    fake = fake_like(source, target)
    become(target, fake)
    assert isinstance(target, FakeTensor)
    become(target, fake)
    assert type(target) is torch.Tensor
    assert target.sum() == 2


def test_identities():
    x = torch.ones(3)
    with mode():
        fake = torch.empty(3)
    assert address_of(x[1:]) == address_of(x) != 0
    assert address_of(fake) == address_of(x.to_sparse()) == 0
    assert storage_of(x[1:]) == storage_of(x)
    assert storage_of(fake[1:]) == storage_of(fake) != storage_of(fake + 1)
    before = state_of(x)
    assert state_of(x) == before
    x.add_(1)
    assert state_of(x) != before
    assert state_of(3) == state_of(3)


def test_failures_on_fakes_are_not_logged(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with mode():
        a, b = torch.empty(2, 3), torch.empty(2, 3)
    with quiet_fakes(), pytest.raises(RuntimeError, match="must have same reduction dim"):
        a @ b
    assert not caplog.records
    assert not log.disabled
