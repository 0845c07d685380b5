"""What people write in steps and hooks, from many fields: one habit each, under every kind of plan."""

import random
import time
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from tests.traps.project import WIDTH, Project, Trap

PLANS = ("zero1", "zero3", "cut", "pp2", "pp2cut", "tp2")


class Both(Project):
    """Has a loss of its own beside that of labels, by the same run of the blocks."""

    def beside(self, hidden: torch.Tensor, batch: Any) -> Any:
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        hidden = self.hidden(batch)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        return loss + self.beside(hidden, batch)


class Running(Project):
    """Divides its loss by a running mean of losses."""

    mean: Any = None

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        value = loss.detach()
        self.mean = value if self.mean is None else 0.9 * self.mean + 0.1 * value
        return loss / self.mean


class RunningNumber(Project):
    """The same with a Python number."""

    mean = 3.0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean


class Remembers(Both):
    """Pulls hidden values to those of the batch before."""

    before: Any = None

    def beside(self, hidden, batch):
        mean = hidden.mean((0, 1))
        loss = 0 if self.before is None else (mean - self.before).square().mean()
        self.before = mean.detach()
        return loss


class DropsLayers(Project):
    """Leaves out blocks by Python's random numbers."""

    def hidden(self, batch):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            if not self.training or random.random() < 0.7:
                hidden = block(hidden)
        return hidden


class Alternates(Project):
    """Two losses in turns."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 2:
            return F.cross_entropy(self.pair(self.hidden(batch).mean(1)), batch["z"])
        return self.loss(batch)


class ByStep(Project):
    """A share of teacher forcing by step."""

    def training_step(self, batch, batch_idx):
        share = max(0.0, 1.0 - self.global_step / 6)
        mixed = {**batch, "x": torch.where(batch["x"] % 7 < 7 * share, batch["x"], batch["y"])}
        return self.loss(mixed)


class Timed(Project):
    """Logs how long its forward takes."""

    def training_step(self, batch, batch_idx):
        start = time.perf_counter()
        loss = self.loss(batch)
        self.log("took", float(time.perf_counter() - start > 1e6))
        return loss


class Cached(Project):
    """Keeps a mask by length."""

    @lru_cache(maxsize=4)  # noqa: B019
    def mask(self, length):
        return torch.tril(torch.ones(length, length, dtype=torch.float64)).sum(0)

    def training_step(self, batch, batch_idx):
        weights = self.mask(batch["x"].shape[1])
        each = F.cross_entropy(self.logits(batch).transpose(1, 2), batch["y"], reduction="none")
        return (each * weights).mean()


class InBatchNegatives(Both):
    """Ranks each row's own target above those of the other rows."""

    def beside(self, hidden, batch):
        mean = F.normalize(hidden.mean(1), dim=-1)
        other = F.normalize(self.embed(batch["y"]).mean(1), dim=-1)
        return 0.1 * F.cross_entropy(mean @ other.T, torch.arange(len(mean)))


class Rolled(Both):
    """Compares each row with the next."""

    def beside(self, hidden, batch):
        mean = hidden.mean(1)
        return 0.1 * F.relu(1 - (mean - mean.roll(1, 0)).square().sum(-1)).mean()


class Standardised(Project):
    """Standardises weights of rows over the batch, as of advantages."""

    def training_step(self, batch, batch_idx):
        each = F.cross_entropy(self.logits(batch).transpose(1, 2), batch["y"], reduction="none").mean(1)
        gain = batch["index"].double() % 5
        return (each * ((gain - gain.mean()) / (gain.std() + 1e-6)).exp()).mean()


class Dice(Both):
    """An overlap over all rows together."""

    def beside(self, hidden, batch):
        share = self.pair(hidden.mean(1)).softmax(-1)[:, 1]
        return 1 - 2 * (share * batch["z"]).sum() / (share.sum() + batch["z"].sum() + 1)


class Balanced(Project):
    """Weighs classes by how often they occur in the batch."""

    def training_step(self, batch, batch_idx):
        counts = torch.bincount(batch["z"], minlength=2).double().clamp(min=1)
        return F.cross_entropy(self.pair(self.hidden(batch).mean(1)), batch["z"], weight=counts.sum() / counts)


class Hardest(Project):
    """Trains on the worse half of the rows."""

    def training_step(self, batch, batch_idx):
        each = F.cross_entropy(self.logits(batch).transpose(1, 2), batch["y"], reduction="none").mean(1)
        return each.topk(max(1, len(each) // 2)).values.mean()


class Smoothed(Project):
    """Label smoothing with ignored labels."""

    def training_step(self, batch, batch_idx):
        labels = batch["y"].masked_fill(batch["y"] % 5 == batch_idx % 5, -100)
        return F.cross_entropy(self.logits(batch).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class Focal(Project):
    """Down-weighs what is known."""

    def training_step(self, batch, batch_idx):
        each = F.cross_entropy(self.logits(batch).transpose(1, 2), batch["y"], reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


class Variance(Both):
    """Keeps the spread over rows above one."""

    def beside(self, hidden, batch):
        return F.relu(1 - hidden.mean(1).std(0)).mean()


class Spectral(Project):
    """A layer under spectral normalisation, whose estimate is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)


class WeightNorm(Project):
    """A layer under weight normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(self.head)


class StepBuffer(Project):
    """Counts its batches in a buffer, and warms up by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        self.batches += 1
        return self.loss(batch) * (self.batches / 6).clamp(max=1.0)


class MeanInHook(Project):
    """Follows the mean of hidden values with a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.blocks[-1].register_forward_hook(self.follow)

    def follow(self, module, args, output):
        if self.training:
            self.mean.mul_(0.9).add_(output.detach().mean((0, 1)), alpha=0.1)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0.1 * self.mean.square().sum()


class OptimizerState(Callback):
    """Looks at the moments of the optimizer."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        states = trainer.optimizers[0].state.values()
        self.seen.append(float(sum(state["exp_avg"].double().abs().sum() for state in states)))


class FlatWeights(Callback):
    """Measures how far weights have moved."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.start: Any = None

    def flat(self, module):
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    def on_train_start(self, trainer, module):
        self.start = self.flat(module).clone()

    def on_train_epoch_end(self, trainer, module):
        self.seen.append(float((self.flat(module) - self.start).norm()))


class Adaptive(Project):
    """Clips each parameter's gradient by the parameter's own norm."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                limit = 0.01 * parameter.detach().norm().clamp(min=1e-3)
                parameter.grad.mul_((limit / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


class SkipsSteps(Project):
    """Steps every second batch only."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        if batch_idx % 2:
            closure()
        else:
            optimizer.step(closure=closure)


class Decays(Project):
    """Multiplies weights after each step by hand."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step(closure=closure)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.mul_(0.99)


class Tied(Project):
    """Shares the embedding with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class LogsDict(Project):
    """Logs by dictionary, with rows given."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_dict({"a": loss, "b": loss * 2, "rows": float(len(batch["x"]))}, batch_size=len(batch["x"]))
        return {"loss": loss, "kept": loss.detach()}


class Generated(Project):
    """Trains on what it predicts itself."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            guess = self.logits(batch).argmax(-1)
        return self.loss({**batch, "x": torch.where(batch["index"][:, None] % 2 == 0, guess, batch["x"])})


class Penalised(Project):
    """Penalises the gradient by the embedded input."""

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["x"])
        embedded = hidden
        for block in self.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + slope.square().sum()


class ByPlace(Project):
    """Layers that read their parameters where modules keep them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + torch.tanh(hidden @ self._parameters["weight"])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Layer() for _ in self.blocks]).double()


class OwnRecurrence(Project):
    """A recurrent layer before the others, and one in each, which read their list of weights."""

    class Layer(nn.GRU):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH, batch_first=True)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            start = hidden.new_zeros(1, hidden.shape[0], WIDTH)
            found = torch.gru(hidden, start, self._flat_weights, True, 1, 0.0, self.training, False, True)
            return hidden + found[0]

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Layer().double()
        self.blocks = nn.ModuleList([self.Layer() for _ in self.blocks]).double()

    def hidden(self, batch: Any) -> torch.Tensor:
        return super().hidden(batch) + self.first(self.embed(batch["x"]))


KERNELS: dict[Any, Any] = {}


class _Prepared(torch.autograd.Function):
    """Its backward is made for a size when that is first seen, as kernels are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.shape not in KERNELS:
            KERNELS[x.shape] = torch.ones(x.shape[-1], dtype=x.dtype)
        return gradient * (KERNELS[x.shape] - x.tanh().square())


class FilledInBackward(Project):
    """A function that keeps, for each size, what its backward needs."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(_Prepared.apply(hidden))
        return hidden


class Library:
    """Loads functions when they are first asked for, as ctypes does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = object()
        setattr(self, name, found)
        return found


LIBRARY = Library()


class _ByLibrary(_Prepared):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert LIBRARY.forwards
        return _Prepared.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert LIBRARY.backwards
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh().square())


class LoadedInBackward(Project):
    """Asks a library for what backward runs in backward."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = _ByLibrary.apply(block(hidden))
        return hidden


EQUAL = (ByStep, Timed, Cached, Standardised, Focal, WeightNorm, SkipsSteps, Tied, LogsDict)
EQUAL += (FilledInBackward, LoadedInBackward)
"""Harmless under every plan: what looks like a trap is not to cost reach."""

CAREFUL = (
    *(Running, RunningNumber, Remembers, DropsLayers, Alternates, InBatchNegatives, Rolled, Dice, Balanced, Hardest),
    *(Smoothed, Variance, Spectral, StepBuffer, MeanInHook, Adaptive, Decays, Generated, Penalised),
)

WHOLE = ("zero1", "zero3", "pp2")

TRAPS = {
    **{kind.__name__: Trap(module=kind, plans=PLANS, equal=WHOLE) for kind in (ByPlace, OwnRecurrence)},
    **{kind.__name__: Trap(module=kind, plans=PLANS, equal=PLANS) for kind in EQUAL},
    **{kind.__name__: Trap(module=kind, plans=PLANS) for kind in CAREFUL},
    "OptimizerState": Trap(callbacks=lambda: [OptimizerState()], plans=PLANS),
    "FlatWeights": Trap(callbacks=lambda: [FlatWeights()], plans=PLANS),
}
