"""Optimizers that look further than one parameter, now or later, and such as only seem to."""

from typing import Any

import torch
from torch import nn

from tests.own_optimizers import Eight, Factored, Lamb, Late, Twice, clips_first
from tests.traps.manual import Manual
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


class _Twice(Twice):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super(Twice, self).step(closure)


def _hooked(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(module.parameters(), 0.05))
    return optimizer


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def _profiled(module: nn.Module) -> torch.optim.Optimizer:
    """Its ``zero_grad`` is put on the object, and says how large gradients are."""
    optimizer = _adam(module)
    plain = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        module.seen += [float(p.grad.norm()) for p in module.parameters() if p.grad is not None]  # type: ignore[operator]
        plain(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    module.seen = []  # type: ignore[assignment]
    return optimizer


class _PutInTraining(Project):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        if batch_idx == 2:
            step = optimizer.step
            optimizer.step = lambda closure=None: step(closure)


def _with(make: Any, project: Any = Project) -> Any:
    class WithOptimizer(project):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return make(self)

    return WithOptimizer


_PUT = "step was put on the AdamW object in place of its class's own"

TRAPS = {
    "put-step": Trap(
        module=_with(lambda m: clips_first(_adam(m))), plans=("plain", "zero1", "zero2", "moved0"), reason=_PUT
    ),
    "put-method": Trap(module=_with(lambda m: clips_first(_adam(m), "method")), plans=("auto", "zero2"), reason=_PUT),
    "put-class": Trap(
        module=_with(lambda m: clips_first(_adam(m), "class")), plans=("zero1",), reason="Clipped couples"
    ),
    "put-by-hand": Trap(module=_with(lambda m: clips_first(_adam(m)), Manual), plans=("zero1",), reason=_PUT),
    "put-on-one-rank": Trap(
        module=_with(lambda m: clips_first(_adam(m)) if m.global_rank == 0 else _adam(m)), plans=("zero1",), reason=_PUT
    ),
    "put-zero": Trap(module=_with(_profiled), plans=("zero1", "pp2"), reason="zero_grad was put on the AdamW object"),
    "put-in-training": Trap(module=_PutInTraining, plans=("zero1",), reason="was put on the AdamW object in training"),
    "eight": Trap(
        module=_with(lambda m: Eight(m.parameters(), block=32, least=256)),
        plans=("zero1", "zero3", "pp2", "tp2", "moved0"),
        equal=("zero1", "zero3", "pp2"),
        reason="would be cut along",
    ),
    "eight-of-most": Trap(
        module=_with(lambda m: Eight(m.parameters(), block=16, least=512)),
        plans=("tp2",),
        reason="blocks begin at 512 entries, and its parts have 256",
    ),
    "factored-from-16": Trap(
        module=_with(lambda m: Factored(m.parameters(), least=16)),
        plans=("zero1", "tp2"),
        equal=("zero1",),
        reason="Factored needs whole parameters",
    ),
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
        module=_with(lambda m: Lamb(m.parameters(), lr=1e-2)),
        plans=("zero1", "zero3", "pp2", "tp2"),
        equal=("zero1", "zero3", "pp2"),
        reason="Lamb needs whole parameters",
    ),
}
