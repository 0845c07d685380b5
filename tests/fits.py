"""What fits of integration tests are made of: a small project and its data, plans for it, trainers that say nothing."""

import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.utils.data import Dataset

from lightning_mist import MistStrategy, Plan
from tests.plans import plan_of

VOCABULARY, WIDTH, LENGTH, LAYERS = 31, 16, 10, 4

ALL = {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0, "activations": 1.0}


def quiet() -> None:
    """Say nothing of what Lightning and torch say of every fit."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A trainer on the CPU that shows and keeps nothing, with as many devices as the world has processes, or two."""
    silent = {
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
        "enable_checkpointing": any(isinstance(item, Checkpoint) for item in options.get("callbacks", ())),
    }
    devices = int(os.environ.get("WORLD_SIZE", "2"))
    return pl.Trainer(strategy=strategy, **{"accelerator": "cpu", "devices": devices, **silent, **options})


def mist(folder: Path, plan: Plan | str, **options: Any) -> MistStrategy:
    """The strategy with a plan, and a folder for what it keeps."""
    kept = {"profile_directory": str(folder / "profiles"), "plan_path": str(folder / "plan.json")}
    return MistStrategy(plan=plan, **{**kept, **options})


def plan(
    layout: Iterable[tuple[int, Sequence[int]]],
    *,
    rows: int,
    microbatches: int,
    zero: int = 0,
    checkpointed: int = 0,
    tensor: int = 1,
    context: int = 1,
    offload: Mapping[str, float] | None = None,
    shard: int | None = None,
    tail: int = 1,
) -> Plan:
    """A plan from ``[(layers, devices), ...]``; batches of ``rows`` rows per rank.

    Stages of fewer devices than ``tensor`` are not split.
    """
    stages = []
    for layers, devices in layout:
        width = tensor if len(devices) % tensor == 0 else 1
        kept = {"zero": zero if len(devices) > width else 0, "checkpointed": min(checkpointed, layers), "shard": shard}
        shape = {"devices": devices, "tensor": width, "context": context, "offload": offload or {}, "tail": tail}
        stages.append({"layers": layers, **shape, **kept})
    return plan_of(rows * sum(len(stage["devices"]) for stage in stages), microbatches, *stages)


class Tokens(Dataset):
    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {"x": self.data[index, :-1], "y": self.data[index, 1:]}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.mix, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.mix(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None])
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Project(pl.LightningModule):
    def __init__(self, dropout=0.0, optimizer="adamw", tied=False):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def loss(self, batch):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()), logits

    def training_step(self, batch, batch_idx):
        loss, logits = self.loss(batch)
        accuracy = (logits.argmax(-1) == batch["y"]).float().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": accuracy, "constant": 2.0}, on_epoch=True, on_step=False, sync_dist=True)
        self.log("tokens", float(batch["x"].numel()), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "accuracy": accuracy.detach()}

    def validation_step(self, batch, batch_idx):
        loss, _ = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if self.hparams.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
