"""Validation during fit: by the plan's forwards, or on the whole module, what it gives is what it gives under DDP."""

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.traps.buffers import BatchNorm
from tests.traps.project import ROWS, Block, Project, Rows, Trap, loader

PLANS = ("zero3whole", "moved3", "pp2", "tp2")
SHARED = ("pp2", "tp2")


class _Own(IterableDataset[dict[str, torch.Tensor]]):
    """So many rows of its own for each rank."""

    def __init__(self, rows: tuple[int, int], seed: int) -> None:
        rank = int(os.environ["RANK"])
        self.rows = Rows(rows[rank], seed + rank)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


def own(*rows: int, seed: int = 5) -> DataLoader[Any]:
    """A loader of as many rows for each rank as are given."""
    return DataLoader(_Own((rows[0], rows[1]), seed), batch_size=ROWS)


class Uneven(Project):
    """Ranks with differing numbers of batches; what each sees is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=len(batch["x"]))
        self.log("val_all", loss, sync_dist=True, batch_size=len(batch["x"]))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)


class OtherHead(Project):
    """Validation classifies rows by a head that training does not use."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.pair(self.hidden(batch).mean(1))
        self.log("val_loss", F.cross_entropy(logits, batch["z"]), sync_dist=True)


class Returned(Project):
    """Validation returns tensors, lists and numbers, which a callback and the module look at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        if batch_idx == 1:
            return None
        return {"loss": loss, "logits": logits, "parts": [loss * 2, batch["index"]], "number": batch_idx, "name": "x"}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is None:
            self.seen.append(-1.0)
            return
        self.seen += [float(outputs["loss"]), *outputs["logits"].flatten().tolist(), outputs["number"]]
        self.seen += [float(outputs["parts"][0]), *outputs["parts"][1].tolist()]


class ReturnedAlone(Project):
    """Validation returns one tensor with a row for each of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.logits(batch).logsumexp((1, 2))

    def on_validation_batch_end(self, outputs: torch.Tensor, batch: Any, batch_idx: int) -> None:
        self.seen += outputs.tolist()


class KeepsLogged(Callback):
    """Keeps what is logged in every batch and at the end of every validation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen += [float(trainer.callback_metrics[name]) for name in sorted(trainer.callback_metrics)]

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.seen += [float(trainer.logged_metrics[name]) for name in sorted(trainer.logged_metrics)]


class Logged(Project):
    """Every way to log."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, rows = self.loss(batch), len(batch["x"])
        self.log("step_and_epoch", loss, on_step=True, on_epoch=True, batch_size=rows)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=rows)
        self.log("most", loss, reduce_fx="max", batch_size=rows)
        self.log("sum", batch["x"].double().sum(), reduce_fx="sum", sync_dist=True)
        self.log_dict({"number": 2.0 * batch_idx, "index": batch["index"].double().mean()}, batch_size=rows)


class TwoLoaders(Project):
    """Two loaders, of which ranks have differing numbers of batches."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss * (1 + dataloader_idx), sync_dist=True, batch_size=len(batch["x"]))
        self.log("of_loader", loss + batch_idx, add_dataloader_idx=True, batch_size=len(batch["x"]))


class Twice(Project):
    """Validation runs the network twice."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        turned = {**batch, "x": batch["x"].flip(1)}
        self.log("val_loss", self.loss(batch) - self.loss(turned), sync_dist=True)


class Collected(Project):
    """Validation collects what it gives on the module, as Lightning's documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.seen += torch.stack(self.outputs).tolist()
        self.log("val_loss", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()


class Gathered(Project):
    """Validation gathers from all ranks itself."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.all_gather(self.loss(batch)).max())


class Norms(Project):
    """A hook of validation looks at all weights."""

    def on_validation_epoch_end(self) -> None:
        self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())


class _DroppedBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden if self.training else hidden * 0.9)


class Modes(Project):
    """Blocks that compute otherwise in evaluation, and dropout that is still on in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_DroppedBlock() for _ in range(4)])
        self.double()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = F.dropout(self.hidden(batch), 0.3, training=True)
        self.log("val_loss", F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten()), sync_dist=True)


class Asks(Project):
    """Validation reads a value back, and goes by it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss * 2 if loss.item() > 2.0 else loss, sync_dist=True)


class ByRank(Project):
    """Validation weighs by the rank that loaded the batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * (1 + self.global_rank), sync_dist=True)


class OfRank(Project):
    """A hook keeps a mean of what this rank's batches gave in a buffer, which the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch) + self.mean
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def on_validation_batch_end(self, outputs: torch.Tensor, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs))
        self.mean.mul_(0.9).add_(outputs, alpha=0.1)


class OutOfPlace(Project):
    """Validation uses a weight of the first layer behind the last one."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        weight = self.blocks[0].up.weight
        self.log("val_loss", self.loss(batch) + weight.square().mean(), sync_dist=True)


class Blind(Project):
    """Validation does not run the network at all."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", float(len(batch["x"])), sync_dist=True)


def _other_size() -> DataLoader[Any]:
    return DataLoader(Rows(20, 3), batch_size=3)


def _two() -> list[DataLoader[Any]]:
    return [own(8, 20), own(12, 4, seed=9)]


TRAPS = {
    "uneven": Trap(module=Uneven, val=lambda: own(22, 5), plans=PLANS, equal=PLANS, whole=()),
    "limited": Trap(
        module=Uneven, val=lambda: own(22, 9), plans=PLANS, equal=PLANS, whole=(), trainer={"limit_val_batches": 2}
    ),
    "no-sanity-check": Trap(
        module=Uneven, val=lambda: own(4, 9), plans=PLANS, equal=PLANS, whole=(), trainer={"num_sanity_val_steps": 0}
    ),
    "within-epochs": Trap(
        module=Uneven,
        val=lambda: own(4, 9),
        plans=PLANS,
        equal=PLANS,
        whole=(),
        trainer={"val_check_interval": 3, "accumulate_grad_batches": 2},
    ),
    "other-head": Trap(module=OtherHead, val=lambda: loader(16, seed=1), plans=PLANS, equal=PLANS, whole=()),
    "other-size": Trap(module=Project, val=_other_size, plans=PLANS, equal=PLANS, whole=()),
    "returned": Trap(module=Returned, val=lambda: own(12, 8), plans=PLANS, equal=PLANS, whole=()),
    "returned-alone": Trap(module=ReturnedAlone, val=lambda: own(12, 8), plans=PLANS, equal=PLANS, whole=()),
    "logged": Trap(
        module=Logged,
        val=lambda: loader(18, seed=1),
        plans=PLANS,
        equal=PLANS,
        whole=(),
        callbacks=lambda: [KeepsLogged()],
    ),
    "two-loaders": Trap(module=TwoLoaders, val=_two, plans=PLANS, equal=PLANS, whole=()),
    "twice": Trap(module=Twice, val=lambda: loader(16, seed=1), plans=PLANS, equal=PLANS, whole=PLANS),
    "collected": Trap(module=Collected, val=lambda: own(12, 5), plans=PLANS, equal=PLANS, whole=SHARED),
    "gathered": Trap(module=Gathered, val=lambda: loader(16, seed=1), plans=PLANS, equal=PLANS, whole=SHARED),
    "norms": Trap(module=Norms, val=lambda: loader(16, seed=1), plans=PLANS, equal=PLANS, whole=PLANS),
    "modes": Trap(module=Modes, val=lambda: own(12, 5), plans=PLANS, equal=PLANS, whole=()),
    "asks": Trap(module=Asks, val=lambda: own(12, 5), plans=PLANS, equal=PLANS, whole=()),
    "by-rank": Trap(module=ByRank, val=lambda: own(12, 5), plans=PLANS, equal=PLANS, whole=()),
    "of-rank": Trap(module=OfRank, val=lambda: own(12, 8), plans=PLANS, equal=PLANS, whole=SHARED),
    "out-of-place": Trap(
        module=OutOfPlace, val=lambda: own(12, 5), plans=PLANS, equal=PLANS, whole=("zero3whole", "moved3", "pp2")
    ),
    "blind": Trap(module=Blind, val=lambda: own(12, 5), plans=PLANS, equal=PLANS, whole=PLANS),
    "batch-norm": Trap(
        module=BatchNorm, val=lambda: loader(16, seed=1), plans=("zero3whole",), equal=("zero3whole",), whole=()
    ),
}
