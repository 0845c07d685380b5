"""Buffers that steps and hooks change: under data parallelism those of rank 0 count, before every forward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.traps.project import LAYERS, VOCABULARY, WIDTH, Project, Trap, loader

SHARDED = ("zero1", "zero2", "zero3whole")


class _NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.norm(self.linear(hidden).transpose(1, 2)).transpose(1, 2))


class BatchNorm(Project):
    """Batch norm in every block; validation uses its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_NormedBlock() for _ in range(LAYERS)])
        self.double()
        self.seen: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [float(buffer.double().sum()) for buffer in self.buffers()]

    def on_validation_epoch_end(self) -> None:
        self.seen += [float(buffer.double().sum()) for buffer in self.buffers()]


class RunningMean(Project):
    """A running mean of what each rank's batches hold, which the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(VOCABULARY, dtype=torch.float64), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counts = torch.bincount(batch["x"].flatten(), minlength=VOCABULARY).double()
        loss = self.loss(batch) * (1 + self.mean.square().mean())
        self.update(counts)
        self.steps += 1
        self.seen += self.mean.tolist()
        return loss

    def update(self, counts: torch.Tensor) -> None:
        self.mean.mul_(0.9).add_(counts, alpha=0.1)


class SetThroughData(RunningMean):
    """The same, with the buffer's data set, and nothing else that a trace would see."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counts = torch.bincount(batch["x"].flatten(), minlength=VOCABULARY).double()
        loss = self.loss(batch) * (1 + self.mean.square().mean())
        self.mean.data = self.mean.data * 0.9 + 0.1 * counts
        return loss


class CopiedThroughData(SetThroughData):
    """The same, with the buffer's data written to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counts = torch.bincount(batch["x"].flatten(), minlength=VOCABULARY).double()
        loss = self.loss(batch) * (1 + self.mean.square().mean())
        self.mean.data.copy_(self.mean.data * 0.9 + 0.1 * counts)
        return loss


class ReplacedBuffer(RunningMean):
    """The same, with another tensor put in the place of the buffer."""

    def update(self, counts: torch.Tensor) -> None:
        self.mean = self.mean * 0.9 + 0.1 * counts


class UpdatedInHook(Project):
    """A buffer that differs by rank, made by a hook outside the step, and read in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.head.scale.mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.head.scale += 0.01 * (1 + dist.get_rank()) * batch["x"].double().mean()


class Queue(Project):
    """A queue of features with a pointer, as contrastive learning keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(12, VOCABULARY, dtype=torch.float64))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch)
        keys = logits.detach().mean(1)
        with torch.no_grad():
            first = int(self.pointer)
            self.queue[first : first + len(keys)] = keys
            self.pointer[0] = (first + len(keys)) % len(self.queue)
        self.seen += self.queue.sum(0).tolist()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        return loss + 0.1 * (logits.mean(1) @ self.queue.T).mean()


class Codebook(Project):
    """Vectors that follow what the embedding gives, without gradients, as in a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        flat = hidden.detach().flatten(0, 1)
        nearest = torch.cdist(flat, self.codes).argmin(1)
        chosen = (nearest[:, None] == torch.arange(8)).double()
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        loss = loss + (hidden.flatten(0, 1) - self.codes[nearest]).square().mean()
        sums, counts = chosen.T @ flat, chosen.sum(0)[:, None]
        self.codes.copy_(torch.where(counts > 0, 0.9 * self.codes + 0.1 * sums / counts.clamp(min=1), self.codes))
        return loss


def _validated() -> Any:
    return loader(16, seed=1)


TRAPS = {
    "batch-norm": Trap(
        module=BatchNorm,
        val=_validated,
        plans=(*SHARDED, "pp2", "tp2"),
        equal=SHARDED,
        reason="running statistics see whole batches",
    ),
    "batch-norm-accumulated": Trap(
        module=BatchNorm,
        val=_validated,
        plans=("zero2",),
        equal=("zero2",),
        trainer={"accumulate_grad_batches": 4, "val_check_interval": 3, "num_sanity_val_steps": 1},
    ),
    "running-mean": Trap(module=RunningMean, plans=("zero1", "pp2"), equal=("zero1",), reason="the step changes"),
    "running-mean-accumulated": Trap(
        module=RunningMean, plans=("zero1",), equal=("zero1",), trainer={"accumulate_grad_batches": 2}
    ),
    "set-through-data": Trap(module=SetThroughData, plans=("zero1", "pp2"), equal=("zero1",), reason="buffer mean"),
    "copied-through-data": Trap(
        module=CopiedThroughData, plans=("zero1", "pp2", "cut"), equal=("zero1",), reason="buffer mean"
    ),
    "replaced-buffer": Trap(module=ReplacedBuffer, plans=("zero1",), equal=("zero1",)),
    "updated-in-hook": Trap(
        module=UpdatedInHook,
        plans=("zero1", "zero3whole", "cut", "pp2", "pp2cut", "tp2"),
        equal=("zero1", "zero3whole", "cut", "pp2", "pp2cut", "tp2"),
    ),
    "queue": Trap(module=Queue, plans=("zero2", "tp2"), equal=("zero2",), reason="the step changes"),
    "codebook": Trap(module=Codebook, plans=("zero3whole", "pp2"), equal=("zero3whole",), reason="buffer codes"),
}
