"""Hooks of the user's own that read, clip, change or skip gradients."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch import nn

from tests.traps.project import Project, Trap

HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end")


def _norm(module: nn.Module) -> float:
    return float(
        torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None] or [torch.zeros(())]).norm()
    )


class Watch(Callback):
    """Keeps the norm of all gradients, in one of the hooks."""

    def __init__(self, hook: str) -> None:
        self.seen: list[float] = []
        setattr(self, hook, self._watch)

    def _watch(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(_norm(pl_module))


class LogsNorms(Project):
    """As Lightning's documentation logs norms."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class Clips(Project):
    """Clips by hand."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ClipsAfterBackward(Project):
    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class ClipsInStep(Project):
    """Runs the closure itself, clips, and steps without it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
            return loss

        optimizer.step(closure=closure)


class ConfiguresClipping(Project):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class SkipsLarge(Project):
    """Leaves out steps with large gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if _norm(self) > 0.5:
            for parameter in self.parameters():
                parameter.grad = None


class Noise(Callback):
    """Adds noise that follows from the gradients of all."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        scale = 0.1 * _norm(pl_module)
        for number, parameter in enumerate(pl_module.parameters()):
            if parameter.grad is not None:
                parameter.grad += scale * torch.sin(torch.arange(parameter.numel()) + number).view_as(parameter)


class Centralises(Project):
    """A hook on each weight takes the mean out of its gradient."""

    def on_fit_start(self) -> None:
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:
                parameter.register_hook(lambda gradient: gradient - gradient.mean(0, keepdim=True))


class CentralisesFromTheStart(Project):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:
                parameter.register_hook(lambda gradient: gradient - gradient.mean(0, keepdim=True))


class AfterAccumulation(Project):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.head.weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(float(p.grad.norm())))


class ScalesByLoss(Project):
    """Multiplies the loss in its own backward: nothing of gradients is looked at."""

    def backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        (0.5 * loss).backward(*arguments, **options)


class WarmsUp(Project):
    """Sets the rate in its own step, as many do."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 8)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


_REASON = "may use gradients"

TRAPS = {
    **{
        f"norm-in-{hook}": Trap(callbacks=lambda hook=hook: [Watch(hook)], plans=("zero1", "pp2"), reason="may use")
        for hook in HOOKS
    },
    "logs-norms": Trap(module=LogsNorms, plans=("zero1", "zero3", "pp2", "tp2"), reason=_REASON),
    "clips": Trap(module=Clips, plans=("zero1", "zero2", "pp2cut"), reason=_REASON),
    "clips-after-backward": Trap(module=ClipsAfterBackward, plans=("zero1", "tp2"), reason=_REASON),
    "clips-in-step": Trap(module=ClipsInStep, plans=("zero1", "pp2"), reason=_REASON),
    "configures-clipping": Trap(
        module=ConfiguresClipping,
        plans=("zero1", "pp2", "checkpointed", "halves"),
        equal=("checkpointed", "halves"),
        reason=_REASON,
    ),
    "skips-large": Trap(module=SkipsLarge, plans=("zero2", "pp2", "halves"), equal=("halves",), reason=_REASON),
    "noise": Trap(callbacks=lambda: [Noise()], plans=("zero3", "tp2", "halves"), equal=("halves",), reason=_REASON),
    "centralises": Trap(
        module=Centralises, plans=("zero1", "pp2", "tp2", "halves"), equal=("zero1",), reason="may use parameters"
    ),
    "centralises-from-the-start": Trap(
        module=CentralisesFromTheStart,
        plans=("zero1", "zero3whole", "pp2", "tp2", "cut"),
        equal=("zero1", "zero3whole"),
        reason="a hook changes or reads the gradient of",
    ),
    "after-accumulation": Trap(
        module=AfterAccumulation, plans=("zero1", "pp2", "halves"), reason="whenever a gradient of head.weight"
    ),
    "scales-by-loss": Trap(module=ScalesByLoss, plans=("zero1", "pp2", "tp2"), equal=("zero1", "pp2", "tp2")),
    "warms-up": Trap(module=WarmsUp, plans=("zero1", "pp2", "tp2"), equal=("zero1", "pp2", "tp2")),
}
