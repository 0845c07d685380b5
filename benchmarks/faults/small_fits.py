"""The smallest project that every kind of plan trains, and fits of it on two processes, under DDP or by a plan."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_mist import Checkpointing, Plan, StagePlan, ZeroStage
from lightning_mist.plan import OffloadRatios, StageMesh
from lightning_mist.runtime.communication import failure
from lightning_mist.strategy.planning import plain_parallelism

WIDTH, LAYERS, ROWS, STEPS, RANKS = 4, 2, 4, 4, 2


class Block(nn.Module):
    """One of the repeated blocks, which tensor parallelism can share out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Small(pl.LightningModule):
    """A regression in double precision on batches that are mappings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def predicted(self, x: Tensor) -> Tensor:
        """The network's output for rows."""
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.predicted(batch["x"]).squeeze(-1) - batch["y"]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def small_plan(
    layout: Sequence[tuple[int, Sequence[int]]], *, microbatches: int = 1, zero: int = 0, tensor: int = 1, **stage: Any
) -> Plan:
    """A plan from ``[(layers, devices), ...]``."""
    stages, first = [], 0
    for layers, devices in layout:
        degree = len(devices) // tensor
        mesh = StageMesh(devices=tuple(devices), data_parallel_degree=degree, tensor_parallel_degree=tensor)
        size = ROWS * RANKS // (microbatches * degree)
        level = ZeroStage(zero if degree > 1 else 0)
        stages.append(
            StagePlan(layers=(first, first + layers), mesh=mesh, microbatch_size=size, zero_stage=level, **stage)
        )
        first += layers
    return Plan(global_batch_size=ROWS * RANKS, num_microbatches=microbatches, stages=tuple(stages))


_ALL = OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0)

PLANS: dict[str, Plan] = {
    "plain": small_plan([(LAYERS, (0, 1))]),
    "zero1": small_plan([(LAYERS, (0, 1))], zero=1),
    "zero3": small_plan([(LAYERS, (0, 1))], zero=3, checkpointing=Checkpointing(layers=1)),
    "zero3cut": small_plan([(LAYERS, (0, 1))], zero=3, microbatches=2),
    "pp2": small_plan([(1, (1,)), (1, (0,))], microbatches=2),
    "pp2cut": small_plan([(1, (0,)), (1, (1,))], microbatches=4),
    "tp2": small_plan([(LAYERS, (0, 1))], microbatches=2, tensor=2),
    "tp2cut": small_plan([(LAYERS, (0, 1))], microbatches=4, tensor=2),
    "offloaded": small_plan([(LAYERS, (0, 1))], zero=1, offload=_ALL),
}


def good_batch(rank: int, number: int) -> dict[str, Tensor]:
    """One of a rank's batches."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.sum(1) / 2}


@dataclass(frozen=True)
class Batches:
    """What a rank's loader gives: an iterable without a length, of which Lightning changes nothing."""

    batches: Callable[[int], Iterable[Any]] = lambda rank: (good_batch(rank, number) for number in range(STEPS))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches(int(os.environ["RANK"])))


class Seen(Callback):
    """Keeps the losses, and whether training has begun."""

    here: "Seen | None" = None

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.has_begun = False
        Seen.here = self

    def on_train_batch_start(self, *_: Any) -> None:
        self.has_begun = True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) if outputs is not None else 0.0)


def has_begun() -> bool:
    """Whether the fit at hand has trained anything."""
    return Seen.here is not None and Seen.here.has_begun


def fit(
    make_strategy: Callable[[], Any],
    folder: Path,
    *,
    loader: Any = None,
    make: Callable[[], pl.LightningModule] = Small,
    resumes: Path | None = None,
    **trainer: Any,
) -> Mapping[str, Any]:
    """What this rank sees in a fit: losses, steps and weights."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    failure.GRACE_SECONDS = 3.0
    # So that searched plans are searched, however little there is to gain.
    plain_parallelism.LEAST_SECONDS = plain_parallelism.LEAST_SECONDS_OF_RUN = 0.0
    pl.seed_everything(3, verbose=False)
    seen = Seen()
    defaults: dict[str, Any] = {"max_epochs": 1, "devices": RANKS}
    made = pl.Trainer(
        strategy=make_strategy(),
        accelerator="cpu",
        logger=False,
        callbacks=[seen],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **(defaults | trainer),
    )
    module = make()
    made.fit(module, Batches() if loader is None else loader, ckpt_path=resumes)
    return {
        "losses": seen.losses,
        "steps": [made.global_step, made.current_epoch],
        "weights": {name: value.double().flatten().tolist() for name, value in module.state_dict().items()},
        "whole": None,
    }
