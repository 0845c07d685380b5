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


class _OwnRate(Project):
    """Lowers its rate by what one rank sees of its own rows: ranks have other rates from then on."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        rises = (batch["index"] % 2).double().mean() * self.current_epoch
        self.log("seen", loss.detach() * (1 + 2 * rises), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "seen"}}


class _OwnMomentum(Project):
    """Sets an option by the loss of its own rows, in a hook."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3:
            self.optimizers().param_groups[0]["betas"] = (float(outputs["loss"]) / 20, 0.99)


class _OwnRateByHand(Manual):
    """Steps its optimizer itself, at a rate of each rank's own from some step on."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3:
            self.optimizers().param_groups[0]["lr"] = 0.01 * (1 + self.global_rank)


class _SameRate(Project):
    """Sets options in every way, alike on all ranks: nothing to be afraid of."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1), momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def on_train_epoch_end(self):
        self.optimizers().param_groups[0]["weight_decay"] = 0.01 * self.current_epoch


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
    "own-rate": Trap(
        module=_OwnRate,
        trainer={"max_epochs": 3},
        plans=("zero1", "zero3", "pp2", "tp2", "movedstate", "plain", "checkpointed"),
        equal=("plain", "checkpointed"),
        reason="'lr' of parameter group 0 was set to another value on one rank",
    ),
    "own-rate-at-first": Trap(
        module=_with(lambda m: torch.optim.SGD(m.parameters(), lr=0.1 / (1 + m.global_rank))),
        plans=("zero1", "pp2", "tp2"),
        reason="parameter group",
    ),
    "own-momentum": Trap(
        module=_OwnMomentum, plans=("zero1", "pp2", "tp2", "plain"), equal=("plain",), reason="'betas' of parameter"
    ),
    "own-rate-by-hand": Trap(module=_OwnRateByHand, plans=("zero1", "zero2"), reason="'lr' of parameter group"),
    "same-rate": Trap(module=_SameRate, plans=_EVERYWHERE, equal=_EVERYWHERE),
    "fused-16-bits": Trap(
        module=_with(lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, fused=True)),
        trainer={"precision": "bf16-true", "max_epochs": 1},
        plans=("zero1", "zero3", "movedstate"),
        equal=("zero1", "zero3", "movedstate"),
    ),
    "lamb": Trap(
        module=_with(lambda m: Lamb(m.parameters(), lr=1e-2)),
        plans=("zero1", "zero3", "pp2", "tp2"),
        equal=("zero1", "zero3", "pp2"),
        reason="Lamb needs whole parameters",
    ),
}
