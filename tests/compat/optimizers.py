"""Optimizers that people bring, under DDP and under plans: ``python -m tests.compat.optimizers NAME [PLAN ...]``.

Everything runs in pairs of processes forked from one that has imported everything. Each trains two epochs in double
precision and saves in between, and then goes on twice: from DDP's checkpoint, and from its own.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its step; eagerly it is the same, and sooner

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_mist import MistStrategy
from lightning_mist.leaves import Wrapping, plain_leaves, put_together, take_apart
from lightning_mist.tensors import leaves
from tests.fits import make_trainer, quiet
from tests.traps.project import PLANS, VOCABULARY, Block, Project, loader
from tests.workers import forked

WIDTH = 64
"""Blocks have matrices of twice as many entries as libraries begin to pack at, and of as many."""

DDP = "ddp_find_unused_parameters_true"
TRAINED = ("zero1", "zero3", "pp2", "movedstate", "checkpointed")
REFUSED = ("tp2",)


@dataclass(frozen=True, kw_only=True)
class Brought:
    """An optimizer of a library.

    Attributes:
        ddp_reads: Whether Lightning's DDP reads what it saves.
    """

    make: Callable[[Any], torch.optim.Optimizer]
    ddp_reads: bool = True


def _bitsandbytes(name: str) -> Brought:
    def make(parameters: Any) -> torch.optim.Optimizer:
        import bitsandbytes

        made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(parameters, lr=1e-3)
        return made

    return Brought(make=make)


def _torchao(name: str) -> Brought:
    def make(parameters: Any) -> torch.optim.Optimizer:
        import torchao.optim

        made: torch.optim.Optimizer = getattr(torchao.optim, name)(parameters, lr=1e-3)
        return made

    return Brought(make=make, ddp_reads=False)


BROUGHT = {
    "bitsandbytes AdamW8bit": _bitsandbytes("AdamW8bit"),
    "bitsandbytes Lion8bit": _bitsandbytes("Lion8bit"),
    "bitsandbytes PagedAdamW8bit": _bitsandbytes("PagedAdamW8bit"),
    "torchao AdamW8bit": _torchao("AdamW8bit"),
}


class Wide(Project):
    """With matrices that are large enough."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in self.blocks])
        self.head, self.pair = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 2)
        self.double()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Saves(Callback):
    """Keeps losses, and saves after the first epoch."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.losses = path, list[float]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0 and self.path is not None:
            trainer.save_checkpoint(self.path)


def fit(brought: Brought, plan: str, folder: Path, *, saved: Path | None = None, start: Path | None = None) -> Any:
    """Losses and weights of one fit, to the end of the second epoch."""
    pl.seed_everything(3, verbose=False)
    strategy: Any = DDP
    if plan != "ddp":
        strategy = MistStrategy(plan=PLANS[plan], profile_directory=str(folder), plan_path=str(folder / "plan.json"))
    module, callback = Wide(brought.make), Saves(saved)
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[callback], limit_val_batches=0, default_root_dir=folder)
    trainer.fit(module, loader(24), ckpt_path=start)
    weights = {name: value.flatten().tolist() for name, value in module.state_dict().items()}
    return {"losses": callback.losses[-3:], "weights": weights}


def run(brought: Brought, plan: str, folder: Path, base: Path) -> None:
    """One rank of one pair: what it found goes into a file."""
    quiet()
    torch.set_num_threads(1)
    path = folder / f"rank{os.environ['RANK']}.json"
    try:
        found = {"straight": fit(brought, plan, folder, saved=folder / "own.ckpt")}
        if plan != "ddp":
            found["from DDP's"] = fit(brought, plan, folder, start=base / "ddp" / "own.ckpt")
        found["from its own"] = fit(brought, plan, folder, start=folder / "own.ckpt") if _reads(brought, plan) else None
        if plan == "ddp" and (zero1 := base / "zero1" / "own.ckpt").exists() and brought.ddp_reads:
            found["from zero1's"] = fit(brought, plan, folder, start=zero1)
        path.write_text(json.dumps(found))
    except BaseException as error:
        path.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise


def _reads(brought: Brought, plan: str) -> bool:
    return plan != "ddp" or brought.ddp_reads


def layout(path: Path) -> dict[str, Any]:
    """What a checkpoint holds of the optimizer, and how: leaves and classes by path."""
    (state,) = torch.load(path, map_location="cpu", weights_only=False)["optimizer_states"]
    apart = take_apart(state)
    classes = [item.cls.__name__ for item in leaves(apart) if isinstance(item, Wrapping)]
    numbers = {repr(at): [str(leaf.dtype), leaf.double().flatten().tolist()] for at, leaf in plain_leaves(apart)}
    assert type(put_together(apart)) is dict
    return {"classes": classes, "numbers": numbers, "groups": repr(state["param_groups"])}


def judged(name: str, plans: list[str]) -> dict[str, list[str]]:
    """By plan what differs from DDP, or ``error``: nothing if all is equal to the bit."""
    brought, verdicts = BROUGHT[name], dict[str, list[str]]()
    brought.make([nn.Parameter(torch.zeros(2))])  # imported before processes part
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        found = {}
        for plan in ("ddp", *plans, *(("ddp again",) if "zero1" in plans else ())):
            folder, work = base / plan, partial(run, brought, plan.split()[0], base / plan, base)
            ranks, _, _ = forked(work, folder, seconds=600.0)
            found[plan] = [{"error": "nothing"} if rank is None else rank for rank in ranks]
        wanted = [ranks["straight"] for ranks in found["ddp"]]
        for plan, ranks in found.items():
            errors = [rank["error"] for rank in ranks if "error" in rank]
            verdicts[plan] = errors or [
                f"{what}: {part} of rank {rank}"
                for rank, every in enumerate(ranks)
                for what, result in every.items()
                for part in ("losses", "weights")
                if result is not None and result[part] != wanted[rank][part]
            ]
            if not errors and layout(base / plan / "own.ckpt") != layout(base / "ddp" / "own.ckpt"):
                verdicts[plan].append("what is saved")
    return verdicts


if __name__ == "__main__":
    print(json.dumps(judged(sys.argv[1], sys.argv[2:] or [*TRAINED, *REFUSED])))
