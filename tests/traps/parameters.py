"""Hooks and callbacks of the user's own that look at parameters, or change them, while ranks may lack some."""

import copy
import gc
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelSummary
from torch import nn

from tests.traps.project import Project, Rows, Trap, loader

AWAY = ("zero3", "pp2", "tp2")


class Average(Callback):
    """An average of parameters kept by hand, put in their place for validation."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.shadow: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.shadow[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
        self.seen.append(sum(float(value.abs().sum()) for value in self.shadow.values()))

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        if self.shadow:
            for name, parameter in pl_module.named_parameters():
                parameter.data.copy_(self.shadow[name])

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.kept[name])


class CopyAtStart(Callback):
    """An average on a copy that is made when the fit starts."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy = copy.deepcopy(pl_module.blocks)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for mine, other in zip(self.copy.parameters(), pl_module.blocks.parameters(), strict=True):
                mine.lerp_(other, 0.1)
        self.seen.append(float(next(self.copy.parameters()).sum()))


class CopyInSetup(Callback):
    """The same, on a copy made before the plan, by the state's names; it keeps the module too."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.module, self.copy = pl_module, copy.deepcopy(pl_module)

    def on_train_epoch_end(self, *_: Any) -> None:
        self.copy.load_state_dict(self.module.state_dict())
        self.seen.append(float(self.copy.head.weight.norm()))


class MeanTeacher(Project):
    """A second module follows the first, and takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        return loss + (logits - self.teacher(hidden.detach())).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.1)


class Clamps(Project):
    """Keeps weights in a range."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.blocks.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class EditsGroups(Project):
    """Reaches parameters by the optimizer, as lookahead and weight decay by hand do."""

    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.optimizers().param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.data.sign(), alpha=-1e-4)


class Normalises(Callback):
    """Rows of unit length, after each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            pl_module.head.weight.div_(pl_module.head.weight.norm(dim=1, keepdim=True))


class ClampsBeforeBackward(Callback):
    """Changes weights after forward, so that backward has others."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.blocks.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class LogsNorm(Project):
    """Logs the norm of all weights."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("weights", torch.cat([p.detach().flatten() for p in self.parameters()]).norm())


class Samples(Callback):
    """Calls the module at the ends of batches and epochs, as those do that show samples."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen.append(float(pl_module.logits(batch).sum()))

    on_train_epoch_end = lambda self, trainer, pl_module: self.seen.append(  # noqa: E731
        float(pl_module.logits({"x": Rows(2).data["x"]}).sum())
    )


class OnFirst(Callback):
    """Takes the state on rank 0 alone, in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1:
            self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}


class Histogram(Project):
    """Numbers of weights in bins, when validation begins and when training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def _count(self) -> None:
        for parameter in self.parameters():
            self.seen += torch.histc(parameter.detach(), 4, -1, 1).tolist()

    def on_validation_start(self) -> None:
        self._count()

    def on_train_end(self) -> None:
        self._count()


class Quiet(Callback):
    """Looks at everything but parameters."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen += [float(loss), rate, trainer.global_step, pl_module.current_epoch]
        pl_module.log("twice", 2 * loss)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(sum(float(p.detach().norm()) for p in pl_module.parameters()))


class Summary(ModelSummary):
    """Lightning's summary; keeps the number of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def summarize(
        self, summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any
    ) -> None:
        self.seen += [total_parameters, trainable_parameters]


class Wrapped(Project):
    """Reaches itself as one does under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.trainer.model.module.current_epoch)


class Hides(Callback):
    """Looks at parameters in a way that cannot be read from its code."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(_hidden())


def _hidden() -> float:
    return sum(float(item.detach().norm()) for item in gc.get_objects() if isinstance(item, nn.Parameter))


class Permuted(Project):
    """A weight whose elements lie in memory in another order than their indices, as under channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())


class Overlapping(Project):
    """A parameter that is a view of another one's memory, and tied to it by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.pair.bias = nn.Parameter(self.head.bias.detach()[:2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.pair(self.embed(batch["x"]).mean(1)).square().mean()


class OneNumber(Project):
    """A parameter whose elements all lie in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(self.head.out_features))


_REASON = "may use parameters"
_ZERO = ("zero1", "zero2")


def _validated() -> Any:
    return loader(16, seed=1)


TRAPS = {
    "average": Trap(callbacks=lambda: [Average()], val=_validated, plans=(*_ZERO, *AWAY), equal=_ZERO, reason=_REASON),
    "copy-at-start": Trap(callbacks=lambda: [CopyAtStart()], plans=("zero1", *AWAY), equal=("zero1",), reason=_REASON),
    "copy-in-setup": Trap(callbacks=lambda: [CopyInSetup()], plans=("zero1", "pp2"), equal=("zero1",), reason=_REASON),
    "mean-teacher": Trap(module=MeanTeacher, plans=("zero1", "zero3", "pp2"), equal=("zero1",), reason=_REASON),
    "clamps": Trap(module=Clamps, plans=("zero2", *AWAY), equal=("zero2",), reason=_REASON),
    "edits-groups": Trap(
        module=EditsGroups, plans=("plain", *_ZERO, *AWAY), equal=("plain",), reason="may use optimizer state"
    ),
    "normalises": Trap(callbacks=lambda: [Normalises()], plans=("zero1", "pp2"), equal=("zero1",), reason=_REASON),
    "clamps-before-backward": Trap(
        callbacks=lambda: [ClampsBeforeBackward()], plans=("zero1", "checkpointed"), reason="forward and backward"
    ),
    "logs-norm": Trap(module=LogsNorm, plans=("zero1", "cut", "tp2"), equal=("zero1",), reason=_REASON),
    "samples": Trap(callbacks=lambda: [Samples()], plans=("zero1", *AWAY), equal=("zero1",), reason=_REASON),
    "on-first": Trap(callbacks=lambda: [OnFirst()], plans=("zero1", "zero3", "pp2"), equal=("zero1",), reason=_REASON),
    "histogram": Trap(module=Histogram, val=_validated, plans=("zero1", "pp2"), equal=("zero1",), reason=_REASON),
    "lambda": Trap(
        callbacks=lambda: [LambdaCallback(on_train_epoch_start=lambda _, module: module.state_dict())],
        plans=("zero3", "pp2"),
        reason=_REASON,
    ),
    "summary": Trap(callbacks=lambda: [Summary()], plans=("zero3", "pp2", "tp2"), equal=("zero3", "pp2", "tp2")),
    "permuted": Trap(module=Permuted, plans=("zero1", "zero3", "moved"), equal=("zero1", "zero3", "moved")),
    "overlapping": Trap(module=Overlapping, plans=("zero1", "zero3", "moved", "pp2", "plain"), equal=("plain",)),
    "one number": Trap(module=OneNumber, plans=("zero1", "zero3")),
    "wrapped": Trap(module=Wrapped, plans=("zero1", "pp2", "tp2"), equal=("zero1", "pp2", "tp2")),
    "hides": Trap(callbacks=lambda: [Hides()], plans=("zero3", "pp2"), reason="its values are on rank"),
    "quiet": Trap(
        callbacks=lambda: [Quiet()],
        val=_validated,
        plans=("zero1", "zero3", "pp2", "pp2cut", "tp2"),
        equal=("zero1", "zero3", "pp2", "pp2cut", "tp2"),
    ),
}
