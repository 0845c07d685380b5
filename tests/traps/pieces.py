"""What is done to weights, gradients and state beside the step, while ranks share out weights in pieces."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from tests.own_optimizers import Own
from tests.traps.project import Project, Trap, loader


class Between(Project):
    """Does something to itself behind every third batch."""

    def act(self) -> None:
        raise NotImplementedError

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 1:
            self.act()


class Ties(Between):
    """Lets two weights lie in the same memory."""

    def act(self) -> None:
        self.head.weight.data = self.embed.weight.data


class Loads(Between):
    def act(self) -> None:
        self.load_state_dict({name: value * 0.9 for name, value in self.state_dict().items()})


class Assigns(Between):
    """Loads so that parameters are other ones from then on, which no optimizer knows."""

    def act(self) -> None:
        self.load_state_dict({name: value * 0.9 for name, value in self.state_dict().items()}, assign=True)


class Presets(Between):
    """Puts gradients in the place of those that were added up so far."""

    def act(self) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)


class Averaged(Callback):
    """An average by torch's own means."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = AveragedModel(pl_module.blocks)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average.update_parameters(pl_module.blocks)
        self.seen.append(float(sum(p.detach().abs().sum() for p in self.average.parameters())))


class Viewed(Project):
    """A buffer that is a part of a weight, which the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", self.head.weight.data[:2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + self.first.square().sum())


class Aliased(Project):
    """The same as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.head.weight.data[:2]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + self.kept[0].square().sum())


class HooksGlobal(Project):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.hook = register_optimizer_step_post_hook(_normalise)

    def on_train_end(self) -> None:
        self.hook.remove()


def _normalise(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.div_(parameter.norm().clamp(min=1.0))


class Keeps(Project):
    """Keeps gradients of the batch before, and pulls the next ones towards these."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}
        self.seen: list[float] = []
        for key, parameter in enumerate(self.blocks.parameters()):
            parameter.register_hook(lambda gradient, key=key: self._pull(key, gradient))

    def _pull(self, key: int, gradient: Any) -> Any:
        before, self.kept[key] = self.kept.get(key), gradient
        return gradient if before is None else gradient + 0.5 * before


class Restarts(torch.optim.lr_scheduler.LambdaLR):
    """Forgets moments at times."""

    def step(self, *arguments: Any) -> None:
        super().step(*arguments)
        if self.last_epoch % 4 == 2:
            self.optimizer.state.clear()


class Shrinks(torch.optim.lr_scheduler.LambdaLR):
    """Keeps each weight's norm small whenever the rate changes."""

    def step(self, *arguments: Any) -> None:
        super().step(*arguments)
        _normalise(self.optimizer)


class Warm(torch.optim.lr_scheduler.LRScheduler):
    """An ordinary schedule, written twice over as people do."""

    def get_lr(self) -> Any:
        scale = min(1.0, (self.last_epoch + 1) / 5)
        return [base * scale for base, group in zip(self.base_lrs, self.optimizer.param_groups, strict=True)]

    def step(self, epoch: Any = None) -> None:
        super().step(epoch)
        for number, (group, rate) in enumerate(zip(self.optimizer.param_groups, self.get_lr(), strict=True)):
            group["lr"] = rate
            group["weight_decay"] = 0.01 * rate * (number + 1)


class Clearing(torch.optim.AdamW):
    """Keeps weights in a range when it clears gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)


class WithSchedule(Project):
    def __init__(self, kind: Any, *arguments: Any) -> None:
        super().__init__()
        self.kind, self.arguments = kind, arguments

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": self.kind(optimizer, *self.arguments), "interval": "step"}]


class WithOptimizer(Project):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=1e-2, **self.options)


class Free(Own):
    """Moves weights along their moments for evaluation, and back, as schedule-free optimizers do."""

    def moves(self, sign: int) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(self.state[parameter].get("m", torch.zeros(())), alpha=sign)

    def eval(self) -> None:
        self.moves(1)

    def train(self) -> None:
        self.moves(-1)


class Evaluates(WithOptimizer):
    """An optimizer that has other weights in evaluation, as schedule-free ones do."""

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.optimizers().eval()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.optimizers().train()


class Mines(Project):
    """Rows are chosen by a weight that the data set has at hand."""

    def train_dataloader(self) -> Any:
        made = loader()
        rows, weight = made.dataset.data, self.blocks[1].up.weight
        return torch.utils.data.DataLoader(Mined(rows, weight), batch_size=made.batch_size)


class Mined(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: Any, weight: Any) -> None:
        self.rows, self.weight = rows, weight

    def __len__(self) -> int:
        return len(self.rows["x"])

    def __getitem__(self, index: int) -> Any:
        chosen = (index + int(1e3 * self.weight.detach().abs().sum())) % len(self)
        return {name: values[chosen] for name, values in self.rows.items()}


def _one(step: int) -> float:
    return 1.0


_ZERO = ("zero1", "zero2")
_WHOLE = (*_ZERO, "zero3whole")
_MOVED = ("movedstate", "moved0")
_STATE = "may use optimizer state"

TRAPS = {
    "ties": Trap(module=Ties, plans=(*_ZERO, "movedstate"), reason="come to lie in the same memory"),
    "loads": Trap(
        module=Loads, plans=(*_WHOLE, "movedstate"), equal=(*_ZERO, "movedstate"), reason="may use parameters"
    ),
    "assigns": Trap(module=Assigns, plans=("plain", *_WHOLE), equal=("plain", *_ZERO), reason="may use parameters"),
    "presets": Trap(
        module=Presets, trainer={"accumulate_grad_batches": 3}, plans=("zero1", "moved0"), reason="may use gradients"
    ),
    "averaged": Trap(callbacks=lambda: [Averaged()], plans=_WHOLE, equal=_ZERO, reason="may use parameters"),
    "ema": Trap(callbacks=lambda: [EMAWeightAveraging(decay=0.9)], plans=("zero1",), reason="EMAWeightAveraging"),
    "swa": Trap(
        callbacks=lambda: [StochasticWeightAveraging(1e-2, 1)], plans=("zero1",), reason="StochasticWeightAveraging"
    ),
    "schedule-free": Trap(
        module=lambda: Evaluates(Free),
        val=lambda: loader(16, seed=1),
        plans=("plain", "zero1", "zero3", "moved0"),
        equal=("plain",),
        reason="Free writes parameters in eval()",
    ),
    "viewed": Trap(
        module=Viewed, plans=(*_WHOLE, "pp2", "tp2"), equal=_ZERO, reason="lies in the memory of head.weight"
    ),
    "aliased": Trap(module=Aliased, plans=("zero1", "zero3whole"), equal=("zero1",), reason="in kept of the module"),
    "hooks for all": Trap(module=HooksGlobal, plans=("zero2", "pp2", "moved0"), equal=("moved0",), reason="_normalise"),
    "keeps": Trap(module=Keeps, plans=_WHOLE, equal=_WHOLE),
    "restarts": Trap(module=lambda: WithSchedule(Restarts, _one), plans=("zero1", *_MOVED), reason=_STATE),
    "shrinks": Trap(module=lambda: WithSchedule(Shrinks, _one), plans=("zero1", "movedstate"), reason=_STATE),
    "warms up": Trap(
        module=lambda: WithSchedule(Warm),
        plans=("zero1", "zero3whole", "movedstate", "tp2"),
        equal=("zero1", "zero3whole", "movedstate", "tp2"),
    ),
    "clears": Trap(
        module=lambda: WithOptimizer(Clearing, eps=1e-3), plans=("zero1", "moved0"), reason="zero_grad of Clearing"
    ),
    "mines": Trap(module=Mines, train=lambda: None, plans=(*_WHOLE, "movedstate"), equal=_ZERO),
}
