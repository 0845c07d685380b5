"""A small project that is trained, validated, tested and asked for predictions; one rank of it, and what it saw."""

import logging
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.uses.session import plain
from lightning_mist import MistStrategy, Plan
from lightning_mist.errors import MistError
from lightning_mist.runtime.batch_run import is_whole
from lightning_mist.runtime.communication import failure
from tests.traps.project import ROWS, WIDTH, Project, Rows

LOADERS: dict[str, tuple[int, ...] | int | None] = {
    "even": None,
    "sampled, the last batch is smaller": 11,
    "other rows on each rank": (16, 13, 14, 15),
    "other numbers of batches": (9, 20, 4, 13),
}
"""Rows of each rank's own loader; a number for one set of rows of which Lightning gives each rank so many, None if its
batches are all full."""

ALIKE = ("even", "sampled, the last batch is smaller")
"""Loaders whose batches come at once on all ranks, as what reduces every step asks of DDP."""

WAYS = ("validate in fit", "validate", "test", "predict")

_HOOKS = [
    name for name in dir(Callback) if name.startswith(("on_train", "on_val", "on_test", "on_predict", "on_sanity"))
]


class _Own(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int, seed: int) -> None:
        self.rows = Rows(rows, seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


def data(name: str) -> DataLoader[Any]:
    """A loader to evaluate on."""
    rank, world, rows = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), LOADERS[name]
    if isinstance(rows, tuple):
        return DataLoader(_Own(rows[rank], 5 + rank), batch_size=ROWS)
    return DataLoader(Rows(world * (3 * ROWS if rows is None else rows), 5), batch_size=ROWS)


class Evaluated(Project):
    """Blocks, and a batch norm behind them that evaluation reads.

    Args:
        dtype: What it computes in.
        is_frozen: Whether the norm is in evaluation mode from the start, so that training does not update it.
        is_alike: Whether every rank has a batch whenever another has one.
    """

    def __init__(self, dtype: torch.dtype, *, is_frozen: bool, is_alike: bool) -> None:
        super().__init__()
        self.norm, self.is_alike = nn.BatchNorm1d(WIDTH), is_alike
        with torch.no_grad():
            self.norm.running_mean.normal_(0.0, 0.1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        self.norm.train(not is_frozen)
        self.to(dtype)

    def logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the head makes of normed hidden values."""
        return self.head(self.norm(self.hidden(batch).transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]

    def evaluated(self, batch: Any, batch_idx: int, name: str) -> Any:
        """A batch of validation or test: logged in many ways, and returned."""
        logits, rows = self.logits(batch), len(batch["x"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        self.log(f"{name}", loss, batch_size=rows)
        self.log(f"{name}_both", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=rows)
        self.log(f"{name}_all", loss, sync_dist=True, batch_size=rows)
        self.log_dict({f"{name}_most": loss, "index": batch["index"].max()}, reduce_fx="max", sync_dist=True)
        self.log("number", 0.1 + batch_idx, reduce_fx="sum", batch_size=rows)
        if self.is_alike:
            self.log(f"{name}_step", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=rows)
        return {"loss": loss, "logits": logits, "numbers": [batch["index"], batch_idx], "modes": self.modes()}

    def modes(self) -> list[bool]:
        """Of the module and of two inside of it, whether they train."""
        return [self.training, self.norm.training, self.blocks[0].training]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """See :meth:`evaluated`."""
        return self.evaluated(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """See :meth:`evaluated`."""
        return self.evaluated(batch, batch_idx, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Logits, classes, rows and modes."""
        logits = self.logits(batch)
        return {"logits": logits, "classes": [logits.argmax(-1), "x"], "rows": batch["index"], "modes": self.modes()}


def _noting(name: str) -> Callable[..., None]:
    def note(self: Any, trainer: Any, module: Any, *arguments: Any) -> None:
        if not name.endswith("batch_end"):
            self.kept.append([name, *(item for item in arguments if isinstance(item, int))])
        else:
            outputs, _, *numbers = arguments
            buffers = [buffer.clone() for buffer in module.buffers()]
            self.kept.append(plain([name, numbers, outputs, {**trainer.callback_metrics}, buffers]))
        if name.startswith("on_train"):
            self.kept.append([name, module.training, module.norm.training])

    return note


Kept = type(
    "Kept",
    (Callback,),
    {"__init__": lambda self: setattr(self, "kept", []), **{name: _noting(name) for name in _HOOKS}},
)
"""Keeps every hook's name and numbers, and of batches outputs, metrics, and buffers."""


def make_trainer(plan: Plan | None, dtype: torch.dtype, folder: Path, watch: Callback) -> pl.Trainer:
    """A trainer of two epochs on all ranks, under DDP without a plan."""
    return pl.Trainer(
        strategy="ddp_find_unused_parameters_true"
        if plan is None
        else MistStrategy(plan=plan, plan_path=str(folder / "plan")),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        precision="64-true" if dtype is torch.float64 else "32-true",
        callbacks=[watch],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


class Session:
    """Evaluations on one rank, under DDP or a plan.

    Args:
        plan: A plan, or None for DDP.
        dtype: What is computed in.
        is_frozen: See :class:`Evaluated`.
        folder: For files of strategies and trainers.
    """

    def __init__(self, plan: Plan | None, dtype: torch.dtype, folder: Path, *, is_frozen: bool) -> None:
        self.plan, self.dtype, self.folder, self.is_frozen = plan, dtype, folder, is_frozen

    def every(self, loaders: Iterable[str]) -> Iterator[tuple[tuple[str, str, str], Any]]:
        """By loader, way and time what this rank saw."""
        for loader in loaders:
            for way, when, seen in self.run(loader):
                yield (loader, way, when), seen

    def run(self, loader: str) -> Iterator[tuple[str, str, Any]]:
        """Evaluate in a fit and after it, and without any fit: what ran, when, and what this rank saw."""
        trainer, watch, module = self._made(loader)
        train = DataLoader(Rows(2 * ROWS * trainer.world_size), batch_size=ROWS)
        trainer.fit(module, train, data(loader))
        yield "whole", "in a fit", self._whole(trainer, is_fit=True)
        yield WAYS[0], "in a fit", [watch.kept, plain({**trainer.logged_metrics}), self._state(module)]
        yield from self._every(trainer, watch, module, loader, "after a fit")
        yield from self._every(*self._made(loader), loader, "without a fit")

    def _made(self, loader: str) -> tuple[Any, Any, Evaluated]:
        pl.seed_everything(3, verbose=False)
        watch = Kept()
        trainer = make_trainer(self.plan, self.dtype, self.folder, watch)
        return trainer, watch, Evaluated(self.dtype, is_frozen=self.is_frozen, is_alike=loader in ALIKE)

    def _every(
        self, trainer: Any, watch: Any, module: Evaluated, loader: str, when: str
    ) -> Iterator[tuple[str, str, Any]]:
        for way in WAYS[1:]:
            watch.kept = []
            found = getattr(trainer, way)(module, data(loader))
            yield "whole", f"{when}, {way}", self._whole(trainer, is_fit=False)
            yield way, when, [watch.kept, plain(found), plain({**trainer.logged_metrics}), self._state(module)]

    def _whole(self, trainer: Any, *, is_fit: bool) -> str | None:
        """Why ranks got the whole module, if they did where the plan leaves them a part."""
        if self.plan is None or is_whole(self.plan, has_masters=False):
            return None
        strategy = trainer.strategy
        return strategy._whole or (None if is_fit or strategy._outside is not None else "there was no plan")

    def _state(self, module: Evaluated) -> Any:
        return plain([module.state_dict(), [item.training for item in module.modules()]])


def keep(run: Callable[[], Iterator[tuple[Hashable, Any]]], path: Path) -> None:
    """What a rank does; what it sees, by what that is, goes into a file, up to the first error."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    failure.GRACE_SECONDS = 5.0
    found: dict[Hashable, Any] = {}
    error = ""
    try:
        for key, seen in run():
            found[key] = seen
    except MistError as refusal:
        error = str(refusal)
        raise
    except BaseException:
        error = traceback.format_exc()
        raise
    finally:
        path.write_bytes(pickle.dumps((found, error)))
