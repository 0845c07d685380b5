import pytest
import torch
from torch import nn

from lightning_mist.model import counting_reason, coupling_reason, whole_tensor_reason


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in [(4, 6), (4,), (2, 2, 2, 2), ()]]


class Lamb(torch.optim.Optimizer):
    """Scales each update by the norm of its parameter."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / p.grad.norm()))


class Coupled(torch.optim.Optimizer):
    """Scales all updates by the norm of all gradients."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm, alpha=1e-3)


class Rows(torch.optim.Optimizer):
    """Its step is one entry by another, but it keeps a state per row."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = p.grad.flatten(1).sum(1) if p.ndim > 1 else p.grad.sum()
                p.sub_(p.grad, alpha=group["lr"])


class Chosen(torch.optim.Optimizer):
    """A group's mark, which is no argument of the constructor, chooses the rule."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad / p.grad.norm() if group["normalised"] else p.grad
                p.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), amsgrad=True, foreach=False),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.ASGD,
        lambda p: Chosen([{"params": p, "normalised": False}]),
    ],
)
def test_optimizers_that_may_update_parts(make):
    optimizer = make(parameters())
    assert whole_tensor_reason(optimizer) is None
    assert coupling_reason(optimizer) is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.Adafactor(p[:1]), r"Adafactor needs whole parameters: .* other values .* 2 dimensions"),
        (lambda p: torch.optim.Adafactor(p[1:2], lr=0.0), r"Adafactor needs whole parameters: .* 1 dimensions"),
        (lambda p: torch.optim.Muon(p[:1]), r"Muon needs whole parameters: .* halved along dimension 0"),
        (Lamb, r"Lamb needs whole parameters: a step gives other values .* such as AdamW or SGD"),
        (lambda p: Rows(p[:1]), r"Rows needs whole parameters: its state 'rows' of shape \(8,\) is another"),
        (lambda p: Coupled(p[:1]), r"Coupled needs whole parameters"),
        (
            lambda p: Chosen([{"params": p[:1], "normalised": False}, {"params": p[1:], "normalised": True}]),
            r"Chosen needs whole parameters",
        ),
        (torch.optim.LBFGS, r"LBFGS cannot be stepped on parts of a parameter: CalledAgainError"),
    ],
)
def test_optimizers_that_need_whole_parameters(make, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(whole_tensor_reason(make(parameters())))


def test_an_optimizer_that_looks_at_all_parameters_at_once():
    reason = coupling_reason(Coupled(parameters()))
    assert reason is not None
    assert "Coupled couples parameters: a step on two gives other values than a step on each" in reason
    assert coupling_reason(Lamb(parameters())) is None
    assert coupling_reason(torch.optim.Adafactor(parameters())) is None


def test_nothing_is_touched():
    made = parameters()
    optimizer, state = torch.optim.AdamW(made), torch.get_rng_state()
    whole_tensor_reason(optimizer)
    coupling_reason(optimizer)
    assert not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) for p in made)
    assert torch.equal(torch.get_rng_state(), state)


def test_groups_that_differ_in_numbers_alone_are_tried_once():
    made = []

    class Counted(torch.optim.SGD):
        def __init__(self, *args, **options):
            made.append(self)
            super().__init__(*args, **options)

    groups = [{"params": [nn.Parameter(torch.ones(4))], "lr": 0.1 * 0.9**index} for index in range(40)]
    optimizer = Counted([*groups, {"params": [nn.Parameter(torch.ones(4))], "lr": 0.1, "momentum": 0.9}])
    made.clear()
    assert whole_tensor_reason(optimizer) is None
    assert {one.param_groups[0]["momentum"] for one in made} == {0, 0.9}
    assert len(made) == 2 * 3  # the whole and two halves, for each kind of group


class Late(torch.optim.Optimizer):
    """Clips by the norm of all gradients after some steps, counted somewhere."""

    def __init__(self, params, lr=1e-3, place="group", late=5):
        super().__init__(params, {"lr": lr, "place": place, "late": late})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        closure()
        group = self.param_groups[0]
        self.steps += 1
        group["steps"] = group.get("steps", 0) + 1
        every = [p for group in self.param_groups for p in group["params"]]
        state = self.state[every[0]]
        state["step"] = state.get("step", torch.zeros(())) + 1
        count = {"own": self.steps, "group": group["steps"], "state": int(state["step"])}[group["place"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm() if count > group["late"] else torch.ones(())
        for p in every:
            p.sub_(p.grad / norm.clamp(min=1.0), alpha=group["lr"])


@pytest.mark.parametrize("place", ["own", "group", "state"])
@pytest.mark.parametrize("late", [5, 1000])
def test_what_begins_late_is_found(place, late):
    assert "Late couples parameters" in coupling_reason(Late(parameters(), place=place, late=late))


class Twice(torch.optim.SGD):
    """Takes the gradient at a point that all gradients lead to, as sharpness-aware minimisation does."""

    def step(self, closure=None):
        closure()
        super().step()
        return super().step(closure)


class Keeps(torch.optim.SGD):
    def __init__(self, module, lr):
        super().__init__(module.parameters(), lr=lr)
        self.module = module


def test_optimizers_that_look_further_by_other_ways():
    assert "Twice calls its closure 2 times" in coupling_reason(Twice(parameters(), lr=0.1))
    assert "has all parameters at hand in its attribute module" in coupling_reason(Keeps(nn.Linear(2, 2), lr=0.1))
    hooked = torch.optim.SGD(parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert "hooks run around the steps of SGD" in coupling_reason(hooked)

    class Needs(torch.optim.SGD):
        def __init__(self, params, rank):
            super().__init__(params, lr=0.1 * rank)

    assert "Needs cannot be stepped on parameters of a trial (TypeError" in coupling_reason(Needs(parameters(), 1))


def test_optimizers_of_torch_are_known_without_a_trial(monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    optimizer = torch.optim.AdamW(parameters())
    assert coupling_reason(optimizer) is None
    assert whole_tensor_reason(optimizer) is None


class Shared(torch.optim.Optimizer):
    """Counts its steps in the group, and steps by them."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["steps"])


class Silent(Shared):
    """Counts them, and does nothing with that."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("cls", [Shared, Silent])
def test_an_optimizer_that_counts_for_all_parameters_together(cls):
    optimizer = cls(parameters())
    assert coupling_reason(optimizer) is None
    reason = counting_reason(optimizer)
    assert reason is not None
    assert reason.startswith(f"{cls.__name__} counts its steps for all parameters together")


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adafactor, lambda p: torch.optim.Muon(p[:1]), Lamb, Rows]
)
def test_optimizers_that_may_update_one_parameter_after_the_other(make):
    assert counting_reason(make(parameters())) is None
