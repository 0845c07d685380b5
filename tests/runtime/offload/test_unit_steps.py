"""Steps by units are the steps of an optimizer that knows of none, to the bit."""

import copy
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_mist.runtime.offload.unit_steps import UnitSteps

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 1e-2, "foreach": True},
    "AdamW": {"lr": 1e-2, "fused": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {},
    "Adafactor": {},
    "ASGD": {},
    "RMSprop": {"momentum": 0.1},
    "Rprop": {},
    "Muon": {},
}


class Derived(torch.optim.AdamW):
    """A class of the user's, whose step calls that of its base class."""

    def step(self, closure=None):
        return super().step(closure)


def parameters():
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 3), (5, 2), (2, 6), (3, 3)]]


def made(cls, options):
    mine = parameters()
    return mine, cls([{"params": mine[:2]}, {"params": mine[2:], "lr": 3e-3}], **options)


def train(optimizer, mine, *, closure, steps=20, scheduler=None):
    generator = torch.Generator().manual_seed(4)
    for number in range(steps):
        gradients = [torch.randn(p.shape, generator=generator) for p in mine]

        def backward(gradients=gradients, number=number):
            for index, (p, gradient) in enumerate(zip(mine, gradients, strict=True)):
                # One has no gradient in some steps.
                p.grad = None if index == 1 and number % 3 == 0 else gradient.clone()
            return torch.tensor(1.0)

        if closure:
            optimizer.step(backward)
        else:
            backward()
            torch.nn.utils.clip_grad_norm_(mine, 0.5)
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Derived"])
def test_by_units_as_in_one(name, closure):
    cls = Derived if name == "Derived" else getattr(torch.optim, name)
    options = OPTIMIZERS.get(name, {})
    (wanted, whole), (mine, optimizer) = made(cls, options), made(cls, options)
    calls = []

    def update():
        for unit in ([mine[2], mine[0]], [mine[1]], [mine[3]]):
            by_units.of(unit)

    by_units = UnitSteps(optimizer, update)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    schedulers = [torch.optim.lr_scheduler.StepLR(item, 3) for item in (whole, optimizer)]
    train(whole, wanted, closure=closure, scheduler=schedulers[0])
    train(optimizer, mine, closure=closure, scheduler=schedulers[1])
    assert all(map(torch.equal, mine, wanted))
    for p, other in zip(mine, wanted, strict=True):
        assert optimizer.state[p].keys() == whole.state[other].keys()
        for key, value in whole.state[other].items():
            assert torch.equal(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value))
    assert optimizer.state_dict()["param_groups"] == whole.state_dict()["param_groups"]
    if name != "Derived":
        assert len(calls) == 20
    by_units.end()
    train(optimizer, mine, closure=closure, steps=2)
    train(whole, wanted, closure=closure, steps=2)
    assert all(map(torch.equal, mine, wanted))


@contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def types_of(optimizer, parameters):
    return [{key: getattr(value, "dtype", None) for key, value in optimizer.state[p].items()} for p in parameters]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_frozen_step_is_that_of_when_it_was_asked_for(name):
    """Rates, gradients, what a scaler lends and the type of new tensors may change before it is taken."""
    cls, options = getattr(torch.optim, name), OPTIMIZERS[name]
    (wanted, whole), (mine, optimizer) = made(cls, options), made(cls, options)

    def update():
        by_units.freeze()

    by_units = UnitSteps(optimizer, update)
    generator = torch.Generator().manual_seed(5)
    for number in range(4):
        for p, other in zip(mine, wanted, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            other.grad = p.grad.clone()
        for item in (whole, optimizer):
            item.step()
            item.zero_grad(set_to_none=number % 2 == 0)
            for group in item.param_groups:
                group["lr"] *= 0.5
        for p in mine:
            before = p.grad
            with default_type(torch.float64):
                by_units.of([p])
                assert torch.get_default_dtype() is torch.float64
            assert p.grad is before
        by_units.thaw()
        assert all(map(torch.equal, mine, wanted))
        given = [(p.grad, other.grad) for p, other in zip(mine, wanted, strict=True)]
        assert all(grad is None if number % 2 == 0 else torch.equal(grad, other) for grad, other in given)
    assert types_of(optimizer, mine) == types_of(whole, wanted)
    assert optimizer.state_dict()["param_groups"] == whole.state_dict()["param_groups"]


def test_a_skipped_step_updates_nothing():
    mine, optimizer = made(torch.optim.AdamW, {"fused": True})
    by_units = UnitSteps(optimizer, lambda: [by_units.of([p]) for p in mine])
    before = copy.deepcopy(mine)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = sum((p * float("inf")).sum() for p in mine)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, mine, before))
    assert scaler.get_scale() == 2.0
    assert optimizer.state_dict()["param_groups"][0]["params"] == [0, 1]


def test_groups_are_whole_again_when_a_step_fails():
    mine, optimizer = made(torch.optim.SGD, {"lr": 0.1})

    def fail():
        raise RuntimeError("no")

    by_units = UnitSteps(optimizer, fail)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    by_units.end()
    assert defaultdict(dict) == optimizer.state
    assert len(mine) == 4
