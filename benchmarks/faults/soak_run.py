"""One rank of the soak: fit after fit in one process, each going on where the last one stopped."""

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.checkpoints.fits import quiet
from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist import MistStrategy, Plan
from lightning_mist.plan import OffloadRatios
from tests import zoo

ROWS, LAYERS, EPOCHS, STEPS, KEPT = 4, 4, 2, 3, 2
"""Rows of a batch, layers of the model, epochs of a fit, steps of an epoch, checkpoints kept beside the last one."""

_ALL = OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0)

PLANS: dict[str, Plan | str] = {
    "dp 2, ZeRO 3": make_plan(Layout(groups=(Group(dp=2, zero=3),)), LAYERS, rows=ROWS),
    "pp 2, all offloaded": make_plan(Layout(groups=(Group(offload=_ALL),) * 2), LAYERS, rows=ROWS),
    "dp 2, ZeRO 1": make_plan(Layout(groups=(Group(dp=2, zero=1),)), LAYERS, rows=ROWS),
    "auto": "auto",
}
FORMS: dict[str, dict[str, bool]] = {
    "file": {},
    "directory": {"save_distributed_checkpoint": True},
    "directory, asynchronously": {"save_distributed_checkpoint": True, "save_asynchronously": True},
}
STOP = "stop"
"""The file that asks both ranks to end after the fit that they are in."""


class Model(pl.LightningModule):
    """A small language model that trains, validates and tests."""

    def __init__(self) -> None:
        super().__init__()
        self.network, _ = zoo.make("nano_even")
        self.losses: list[float] = []
        self.first_step = -1

    def _loss(self, batch: Any) -> torch.Tensor:
        return zoo.loss_of(self.network.training_step(batch, 0))

    def on_train_start(self) -> None:
        """See which step is the first."""
        self.first_step = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The network's."""
        return {"loss": self._loss(batch)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the loss down."""
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The mean loss."""
        self.log("val", self._loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """The mean loss."""
        self.log("test", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW, with a scheduler of the learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a fit stopped."""

    checkpoint: Path
    step: int
    val: float


def batches(seed: int, count: int) -> DataLoader[Any]:
    """Sequences that count up or down, by as much as nobody says."""
    generator = torch.Generator().manual_seed(seed)
    first, stride = torch.randint(zoo.EVEN, (2, 2 * ROWS * count, 1), generator=generator)
    tokens = (first + stride * torch.arange(9)) % zoo.EVEN
    return DataLoader(TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), batch_size=ROWS)


def make_trainer(folder: Path, plan: str, form: str, epochs: int) -> pl.Trainer:
    """A trainer that keeps the newest checkpoints, and one called last."""
    kept = pl.callbacks.ModelCheckpoint(
        folder / "checkpoints",
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=KEPT,
        save_last=True,
        save_on_train_epoch_end=True,
    )
    return pl.Trainer(
        strategy=MistStrategy(plan=PLANS[plan], profile_directory=str(folder / "profiles"), **FORMS[form]),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[kept],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def fit(number: int, folder: Path, before: Stop | None) -> tuple[Stop, dict[str, Any]]:
    """One round: evaluate what the last fit left, go on from there, evaluate again.

    Raises:
        RuntimeError: If something is not finite, or not where the last fit stopped.
    """
    plan, form = (list(table)[number % len(table)] for table in (PLANS, FORMS))
    validation = batches(1, 2)
    epochs = EPOCHS * (number + 1)
    if before is not None:
        found = make_trainer(folder, plan, form, epochs).validate(
            Model(), validation, ckpt_path=before.checkpoint, verbose=False
        )
        _agree("the loss of the last checkpoint", found[0]["val"], before.val)
    module, trainer = Model(), make_trainer(folder, plan, form, epochs)
    trainer.fit(module, batches(number + 2, STEPS), validation, ckpt_path=None if before is None else before.checkpoint)
    _agree("the first step", module.first_step, 0 if before is None else before.step)
    _agree("the last step", trainer.global_step, epochs * STEPS)
    if len(module.losses) != EPOCHS * STEPS or not torch.tensor(module.losses).isfinite().all():
        raise RuntimeError(f"fit {number}: losses {module.losses}")
    val = trainer.validate(module, validation, verbose=False)[0]["val"]
    test = trainer.test(module, validation, verbose=False)[0]["test"]
    _agree("the loss when tested", test, val)
    kept = trainer.checkpoint_callback
    assert isinstance(kept, pl.callbacks.ModelCheckpoint)
    stop = Stop(checkpoint=Path(kept.last_model_path), step=trainer.global_step, val=val)
    return stop, {"plan": plan, "form": form, "step": stop.step, "loss": module.losses[-1], "val": val}


def _agree(what: str, found: float, expected: float) -> None:
    if not abs(found - expected) <= 1e-5 * abs(expected):
        raise RuntimeError(f"{what} is {found}, and was to be {expected}")


def sample(folder: Path) -> dict[str, int]:
    """What this process holds, and what lies on disk."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    shared = [path for path in Path("/dev/shm").iterdir() if str(os.getpid()) in path.name]
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "checkpoints": len(list((folder / "checkpoints").iterdir())),
        "temporary_files": len(list((folder / "temporary").rglob("*"))) + len(shared),
    }


def rounds(folder: Path, until: float) -> Iterator[dict[str, Any]]:
    """Rounds until the time is up or the file ``stop`` is there, as rank 0 sees it."""
    before = None
    for number in count():
        started = time.time()
        before, found = fit(number, folder, before)
        yield {"fit": number, **found, **sample(folder), "fit_seconds": time.time() - started}
        is_over = [time.time() > until or (folder / STOP).exists()]
        dist.broadcast_object_list(is_over)
        if is_over[0]:
            return


def main() -> None:
    """Fit until the time is up; a line of JSON after every fit, and ``--out`` at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    until = time.time() + given.seconds
    with (given.folder / f"rank{os.environ['RANK']}.jsonl").open("w") as file:
        for found in rounds(given.folder, until):
            print(json.dumps(found), file=file, flush=True)
    if os.environ["RANK"] == "0" and given.out is not None:
        given.out.write_text(json.dumps({"is_over": True}))


if __name__ == "__main__":
    main()
