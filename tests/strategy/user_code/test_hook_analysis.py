"""What the names in a training step say of what it looks at."""

import functools

import pytest
import torch
from torch import nn

from lightning_mist.strategy.user_code import read_in_step
from lightning_mist.strategy.user_code.hook_analysis import body_of


def keep(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@keep
def decorated(a, b):
    return [a.c for _ in b]


FIRST, SECOND = (lambda x: x + 1), (lambda x: x * 2)


def test_functions_are_found_where_they_were_written():
    assert len(body_of(decorated.__wrapped__.__code__)) == 1
    # Which of two on one line it is cannot be told: both count.
    assert len(body_of(FIRST.__code__)) == len(body_of(SECOND.__code__)) == 2


def test_of_functions_without_source_there_is_none():
    space = {}
    exec("def f(a, b):\n    c = lambda: b.d\n    return c", space)
    assert body_of(space["f"].__code__) is None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Penalised(Net):
    def training_step(self, batch):
        (slope,) = torch.autograd.grad(self.layer(batch).sum(), batch, create_graph=True)
        return slope.norm()


class Looks(Net):
    def training_step(self, batch):
        torch.autograd.grad(self.layer(batch).sum(), batch)
        return self.layer.weight.grad


class Clips(Net):
    def training_step(self, batch):
        self.helped()

    def helped(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Average:
    def update(self, optimizer):
        return optimizer.state


class LooksAtState(Net):
    def __init__(self):
        super().__init__()
        self.average = Average()

    def training_step(self, batch):
        self.average.update(self.optimizers())


def watched(function):
    @functools.wraps(function)
    def around(self, batch):
        self.log("norm", self.weight.grad.norm())
        return function(self, batch)

    return around


class IsDecorated(Looks):
    @watched
    def training_step(self, batch):
        return batch


def clip(module):
    module.helped()


class HandsItselfOn(Clips):
    def training_step(self, batch):
        clip(self)


def looking():
    def look(parameters):
        return [p.grad for p in parameters]

    return stepping(look)


class HasItInside(Net):
    def __init__(self):
        super().__init__()
        self.training_step = looking()


class LeavesHooks(Net):
    def __init__(self):
        super().__init__()
        self.norms = []
        for each in self.parameters():
            each.register_post_accumulate_grad_hook(lambda parameter: self.norms.append(parameter.grad.norm()))

    def training_step(self, batch):
        return batch


def stepping(look):
    def step(batch):
        return look([])

    return step


class _Caller:
    def __init__(self, look):
        self.look = look

    def __call__(self, module):
        return self.look(module)


def _quiet(module):
    return module


def _norms(module):
    return [p.grad for p in module.parameters()]


class CallsSeveral(Net):
    def __init__(self):
        super().__init__()
        self.first, self.second = _Caller(_quiet), _Caller(_norms)

    def training_step(self, batch):
        return self.first(self), self.second(self)


@pytest.mark.parametrize(
    ("module", "what", "name"),
    [
        (CallsSeveral, "gradients", "grad in _norms"),
        (HandsItselfOn, "gradients", "clip_grad_norm_ in helped"),
        (HasItInside, "gradients", "grad in look"),
        (LeavesHooks, "gradients", "grad in __init__"),
        (IsDecorated, "gradients", "grad in around"),
        (Looks, "gradients", "grad in training_step"),
        (Clips, "gradients", "clip_grad_norm_ in helped"),
        (LooksAtState, "optimizer state", "state in update"),
    ],
)
def test_what_a_step_looks_at_is_named(module, what, name):
    found = read_in_step(module())
    assert found is not None
    assert found[0] == what
    assert name in f"{found[1]} in {found[2]}"


def test_a_step_that_cannot_be_read_may_look_at_gradients():
    module = Net()
    module.training_step = functools.partial(Looks.training_step, module)
    assert read_in_step(module) == ("gradients", "partial", "which is not read")


def test_gradients_that_torch_returns_are_not_those_of_parameters():
    assert read_in_step(Penalised()) is None
