"""A small project in which something goes wrong, under one of several plans."""

import logging
import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.faults.points import POINTS, Point, arm
from lightning_mist import MistStrategy, Plan, StagePlan, ZeroStage
from lightning_mist.plan import StageMesh
from lightning_mist.runtime.communication import failure
from tests.machine import assume_profile

WIDTH, LAYERS, ROWS = 8, 4, 4
DONE = "trained to the end"
HASTY = "LIGHTNING_MIST_FAULTS_HASTY"
"""Set while ranks are to wait for each other a few seconds only."""


class Rows(Dataset[Tensor]):
    """Numbers."""

    def __init__(self, count: int) -> None:
        self._values = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Tensor:
        return self._values[index]


class Fragile(pl.LightningModule):
    """Trains, and has a method wherever it may be harmed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 1)
        self._is_training = False

    def seen_while_planning(self) -> None:
        """Called in the step until training starts."""

    def seen_while_training(self) -> None:
        """Called in the step from then on."""

    def seen_in_backward(self, gradient: Tensor) -> None:
        """Called when gradients come to the first block while training."""

    def on_train_start(self) -> None:
        self._is_training = True

    def _loss(self, batch: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            batch = block(batch)
            if number == 0 and self._is_training and batch.requires_grad:
                batch.register_hook(self.seen_in_backward)
        return F.mse_loss(self.head(batch), batch.detach().sum(1, keepdim=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._is_training:
            self.seen_while_training()
        else:
            self.seen_while_planning()
        return self._loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _plan(layouts: list[tuple[int, list[int]]], *, microbatches: int = 1, zero: int = 0, tensor: int = 1) -> Plan:
    stages, first = [], 0
    for layers, devices in layouts:
        degree = len(devices) // tensor
        stages.append(
            StagePlan(
                layers=(first, first + layers),
                mesh=StageMesh(devices=tuple(devices), data_parallel_degree=degree, tensor_parallel_degree=tensor),
                microbatch_size=ROWS * 2 // (microbatches * degree),
                zero_stage=ZeroStage(zero),
            )
        )
        first += layers
    return Plan(global_batch_size=2 * ROWS, num_microbatches=microbatches, stages=tuple(stages))


PLANS: dict[str, Plan | str] = {
    "plain": _plan([(4, [0, 1])]),
    "pp2": _plan([(2, [1]), (2, [0])], microbatches=2),
    "zero1": _plan([(4, [0, 1])], zero=1),
    "zero3": _plan([(4, [0, 1])], zero=3),
    "tp2": _plan([(4, [0, 1])], microbatches=2, tensor=2),
    "auto": "auto",
}


def runs_under(point: Point, plan: str) -> bool:
    """Whether a point is come to under a plan."""
    is_auto = plan == "auto"
    kinds = {
        "any": not is_auto,
        "engine": plan not in ("auto", "plain"),
        "stages": plan not in ("auto", "plain", "zero1"),
        "auto": is_auto,
    }
    return kinds[point.plans]


def train(name: str, folder: Path) -> None:
    """Fit the project as a rank of the world called ``POINT/KIND/PLAN``; a kind of ``all-`` harms every rank."""
    where, kind, plan = name.split("/")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if os.environ.get(HASTY):
        failure.GRACE_SECONDS, failure.TOLD_SECONDS, failure.AGREE_SECONDS = 2.0, 3.0, 2.0
    arm(POINTS[where], kind.removeprefix("all-"), folder, everybody=kind.startswith("all-"))
    profiles = folder / "profiles"
    if os.environ["LOCAL_RANK"] == "0":
        assume_profile(profiles, 2)
    strategy = MistStrategy(plan=PLANS[plan], profile_directory=str(profiles), correct_profile=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        callbacks=[
            ModelCheckpoint(dirpath=folder / "checkpoints", save_top_k=-1),
            OnExceptionCheckpoint(folder / "checkpoints", "on_exception"),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    trainer.fit(
        Fragile(), DataLoader(Rows(6 * 2 * ROWS), batch_size=ROWS), DataLoader(Rows(2 * 2 * ROWS), batch_size=ROWS)
    )
    print(DONE)
