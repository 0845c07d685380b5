"""Optimizers that look further than one parameter, now or later, and such as only seem to."""

from typing import Any

import torch
from torch import nn

from tests.model.split.test_optimizer_coupling import Lamb, Late, Twice
from tests.traps.project import Project, Trap

_EVERYWHERE = ("zero1", "zero3", "pp2", "tp2")


class _Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: climbs along the gradient of all, and takes the gradient there."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        climbs = [0.05 * p.grad / norm for p in every]
        for parameter, climb in zip(every, climbs, strict=True):
            parameter.add_(climb)
        with torch.enable_grad():
            closure()
        for parameter, climb in zip(every, climbs, strict=True):
            parameter.sub_(climb)
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


class _DecaysByAll(torch.optim.Optimizer):
    """Decays weights by the norm of all, which it reads from the module."""

    def __init__(self, params: Any, module: nn.Module, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.module = module

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        norm = torch.stack([p.norm() for p in self.module.parameters()]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad + 1e-3 * norm * parameter, alpha=group["lr"])
        return loss


class _Lamb(Lamb):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += 1e-12
        super().step()
        return loss


class _Twice(Twice):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super(Twice, self).step(closure)


def _hooked(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(module.parameters(), 0.05))
    return optimizer


def _with(make: Any) -> Any:
    class WithOptimizer(Project):
        def configure_optimizers(self) -> Any:
            return make(self)

    return WithOptimizer


TRAPS = {
    "sam": Trap(module=_with(lambda m: _Sam(m.parameters())), plans=_EVERYWHERE, reason="calls its closure 2 times"),
    "late-norm": Trap(
        module=_with(lambda m: Late(m.parameters(), lr=0.1)), plans=_EVERYWHERE, reason="Late couples parameters"
    ),
    "decays-by-all": Trap(
        module=_with(lambda m: _DecaysByAll(m.parameters(), m)),
        plans=("zero1", "pp2"),
        reason="has all parameters at hand in its attribute module",
    ),
    "twice": Trap(module=_with(lambda m: _Twice(m.parameters(), lr=1e-2)), plans=("zero1", "pp2"), reason="closure"),
    "hooked": Trap(module=_with(_hooked), plans=("zero1", "pp2"), reason="hooks run around the steps of SGD"),
    "lamb": Trap(
        module=_with(lambda m: _Lamb(m.parameters(), lr=1e-2)),
        plans=("zero1", "zero3", "pp2", "tp2"),
        equal=("zero1", "zero3", "pp2"),
        reason="Lamb needs whole parameters",
    ),
}
