import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mist.model.fakes.origins import Origins
from lightning_mist.model.trace.ledger import Ledger


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * 2  # line of inner


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Inner(), Inner()

    def forward(self, x):
        return self.two(self.one(x)).exp()  # line of outer


def line_of(text):
    with open(__file__, encoding="utf-8") as file:
        return next(f"test_origins.py:{number}" for number, line in enumerate(file, 1) if f"# line of {text}" in line)


def seen(module, run):
    names = {id(item): name for name, item in module.named_modules()}
    parameters = {id(p): name for name, p in module.named_parameters()}
    origins = Origins(names, parameters)
    ledger = Ledger(1, origins)
    with ledger, origins.watching():
        loss = run(module).sum()
        ledger.enter(0, backward=True)
        loss.backward()
    return ledger.storages


def test_operators_of_backward_come_from_the_module_and_line_that_they_undo():
    module = Outer()
    made = seen(module, lambda m: m(torch.ones(2, 3)))
    forward = [(s.operator.split(".")[1], s.origin) for s in made if s.cause == "forward"]
    assert ("tanh", ("one", line_of("inner"))) in forward
    assert ("tanh", ("two", line_of("inner"))) in forward
    assert ("exp", ("", line_of("outer"))) in forward
    assert ("addmm", ("one.linear", line_of("inner"))) in forward
    backward = [(s.operator.split(".")[1], s.origin) for s in made if s.cause == "backward"]
    assert ("tanh_backward", ("two", line_of("inner"))) in backward
    assert ("tanh_backward", ("one", line_of("inner"))) in backward
    assert ("mm", ("one.linear", line_of("inner"))) in backward


def test_hooks_on_modules_are_gone_afterwards_also_after_an_error():
    class Failing(Outer):
        def forward(self, x):
            raise KeyError("no")

    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    with pytest.raises(KeyError):
        seen(Failing(), lambda m: m(torch.ones(2, 3)))
    assert len(hooks) == before


def test_a_repeated_forward_is_told_from_the_backward_around_it():
    class Repeating(Outer):
        def forward(self, x):
            with_context = lambda y: self.two.forward(self.one(y))  # noqa: E731
            return checkpoint(with_context, x, use_reentrant=False)

    made = seen(Repeating(), lambda m: m(torch.ones(2, 3, requires_grad=True)))
    again = [s.origin for s in made if s.cause == "backward" and s.operator == "aten.tanh.default"]
    assert ("one", line_of("inner")) in again


def test_a_gradient_that_is_copied_belongs_to_its_parameter():
    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (self.scale.sum() * x).sum()

    made = seen(Broadcast(), lambda m: m(torch.ones(2)))
    copies = [s for s in made if s.cause == "accumulate"]  # an expanded gradient gets elements of its own
    assert [s.bytes for s in copies] == [16]
