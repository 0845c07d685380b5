import functools
import threading
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_mist.optimizers import is_entrywise, is_torchs, like, looks_around, replaced_methods, tensors_within


class Options:
    def __init__(self, bits):
        self.bits, self.steps = bits, 0


class Attributes(torch.optim.SGD):
    """Keeps what no group has: numbers, a helper object, a method that it chose, and something there is one of."""

    def __init__(self, params, lr=0.1, bits=8):
        super().__init__(params, lr=lr, momentum=0.9)
        self.options, self.counts, self.lock = Options(bits), {"steps": [0]}, threading.Lock()
        self.scale, self.generator = torch.tensor(2.0), torch.Generator().manual_seed(0)
        self.rule = self._rule

    def _rule(self):
        self.options.steps += 1
        self.counts["steps"][0] += 1
        self.scale.mul_(2)
        torch.rand(1, generator=self.generator)

    def step(self, closure=None):
        self.rule()
        return super().step(closure)


def parameter(value=1.0, size=3):
    made = nn.Parameter(torch.full((size,), value))
    made.grad = torch.ones(size)
    return made


def stepped_like(optimizer):
    other = parameter(5.0)
    made = like(optimizer, [{**optimizer.param_groups[0], "params": [other]}])
    made.step()
    return made, other


def test_another_of_its_kind_changes_nothing_of_the_original():
    own = parameter()
    optimizer = Attributes([own], lr=torch.tensor(0.1), bits=4)
    optimizer.state[own]["momentum_buffer"] = torch.ones(3)
    drawn = optimizer.generator.get_state()
    made, other = stepped_like(optimizer)
    assert type(made) is Attributes
    assert (made.options.bits, made.options.steps, made.counts, float(made.scale)) == (4, 1, {"steps": [1]}, 4.0)
    assert (optimizer.options.steps, optimizer.counts, float(optimizer.scale)) == (0, {"steps": [0]}, 2.0)
    assert torch.equal(optimizer.generator.get_state(), drawn)
    assert not torch.equal(made.generator.get_state(), drawn)
    assert made.lock is optimizer.lock
    assert list(made.state) == [other]
    assert torch.equal(own, torch.ones(3))
    assert float(other[0].detach()) == pytest.approx(4.9)
    made.param_groups[0]["lr"].fill_(7)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


def put_function(optimizer):
    plain = optimizer.step
    optimizer.step = lambda closure=None: plain(closure)


def put_method(optimizer):
    plain = optimizer.step
    optimizer.step = MethodType(lambda self, closure=None: plain(closure), optimizer)


def put_partial(optimizer):
    optimizer.step = functools.partial(type(optimizer).step, optimizer)


def put_around_the_schedulers(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plain = optimizer.step
    optimizer.step = functools.wraps(plain)(lambda *_: plain())


def put_below_the_schedulers(optimizer):
    put_method(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    "put", [put_function, put_method, put_partial, put_around_the_schedulers, put_below_the_schedulers]
)
def test_what_is_put_on_an_object_is_seen_and_stays_there(put):
    own = parameter()
    optimizer = torch.optim.SGD([own], lr=0.1)
    assert is_torchs(optimizer)
    put(optimizer)
    assert replaced_methods(optimizer) == ("step",)
    assert not is_torchs(optimizer)
    _, other = stepped_like(optimizer)
    assert torch.equal(own, torch.ones(3))
    assert float(other[0].detach()) == pytest.approx(4.9)


def test_other_methods_count_and_schedulers_do_not():
    optimizer = torch.optim.SGD([own := parameter()], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert replaced_methods(optimizer) == ()
    assert is_torchs(optimizer)
    stepped_like(optimizer)
    assert torch.equal(own, torch.ones(3))
    optimizer.zero_grad, optimizer.state_dict = (lambda *_: None), dict
    assert replaced_methods(optimizer) == ("zero_grad", "state_dict")
    assert replaced_methods(Attributes([parameter()])) == ()


def test_torchs_own_is_of_its_class_and_stepped_by_its_code(monkeypatch):
    optimizer = torch.optim.AdamW([parameter()])
    optimizer.__class__ = type("AdamW", (torch.optim.AdamW,), {})
    assert not is_torchs(optimizer)
    optimizer = torch.optim.AdamW([parameter()])
    monkeypatch.setattr(torch.optim.AdamW, "step", functools.wraps(torch.optim.AdamW.step)(lambda *_: None))
    assert not is_torchs(optimizer)
    monkeypatch.undo()
    assert is_torchs(optimizer)
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    assert looks_around(optimizer) == "hooks run around the steps of AdamW, and may look at all parameters at once"
    hook.remove()
    optimizer.register_step_post_hook(lambda *_: None)
    assert not is_torchs(optimizer)
    _, other = stepped_like(optimizer)
    assert not torch.equal(other, torch.full((3,), 5.0))


@pytest.mark.parametrize(
    "hold",
    [
        lambda p, module: module,
        lambda p, module: [{"own": p}],
        lambda p, module: {id(p): 1},
        lambda p, module: torch.optim.SGD([p], lr=0.1),
        lambda p, module: lambda: p,
        lambda p, module: functools.partial(print, p),
    ],
)
def test_parameters_at_hand_are_found(hold):
    module = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert looks_around(optimizer) is None
    optimizer.held = hold(module.weight, module)
    assert "SGD has all parameters at hand in its attribute held" in looks_around(optimizer)
    made = like(optimizer, [{**optimizer.param_groups[0], "params": [parameter()]}])
    if isinstance(optimizer.held, nn.Module | torch.optim.Optimizer):
        assert made.held is optimizer.held


def test_groups_of_another_object_are_refused():
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

        @property
        def param_groups(self):
            return self.inner.param_groups

    with pytest.raises(TypeError, match="Around keeps its groups or its state in another object"):
        like(Around(torch.optim.SGD([parameter()], lr=0.1)), [])


def test_tensors_are_found_wherever_a_value_leads():
    class Holder:
        def __init__(self, inner):
            self.inner = inner

    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    circle = [one, {"a": (two, Holder([three])), 3: "text"}]
    circle.append(circle)
    assert sorted(len(found) for found in tensors_within(circle)) == [1, 2, 3]


def test_torchs_own_are_known_to_treat_entries_alone():
    assert is_entrywise(torch.optim.AdamW)
    assert not is_entrywise(torch.optim.Adafactor)
    assert not is_entrywise(type("AdamW", (torch.optim.AdamW,), {}))
