"""The demo's model and data under DDP and under plans of every kind, five steps each, and what goes on from what.

Started in two processes by :mod:`benchmarks.launch`. In double precision, so that plans can be held against DDP to
1e-10: losses and the norm of all weights.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.plans import SEARCHED
from benchmarks.record import ROOT
from lightning_mist import MistStrategy
from tests.fits import ALL, plan

LAYERS, WIDTH, LENGTH, ROWS, STEPS, SAVED_AFTER = 4, 64, 32, 4, 5, 3
TOLERANCE = 1e-10

PLANS: dict[str, dict[str, Any]] = {
    "mist": {},
    "mist, searched": {"search": SEARCHED},
    "pp 2": {"plan": plan([(2, [0]), (2, [1])], rows=ROWS, microbatches=4)},
    "ZeRO-3": {"plan": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=3, checkpointed=2)},
    "tp 2": {"plan": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2, tensor=2)},
    "offload": {"plan": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=1, offload=ALL)},
}


class Keeps(pl.Callback):
    """Losses, and a checkpoint on the way."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.losses = path, list[float]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Keep the loss, and save once."""
        self.losses.append(float(outputs["loss"]))
        if self.path is not None and trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def fit(strategy: Any, folder: Path, *, saved: Path | None = None, start: Path | None = None) -> list[float]:
    """Losses of the steps, and the norm of all weights at the end."""
    sys.path[:0] = [] if str(ROOT / "examples" / "byte_gpt") in sys.path else [str(ROOT / "examples" / "byte_gpt")]
    from data import StandardLibrary
    from model import ByteGPT

    pl.seed_everything(1, verbose=False)
    module, keeps = ByteGPT(layers=LAYERS, width=WIDTH, length=LENGTH).double(), Keeps(saved)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        precision="64-true",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        callbacks=[keeps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, StandardLibrary(length=LENGTH, batch_size=ROWS), ckpt_path=start)
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.cat([parameter.flatten() for parameter in module.parameters()]))
    return [*keeps.losses, float(norm)]


def main() -> None:
    """Every fit; the first rank writes what differs from DDP, and seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder, found = given.folder, dict[str, Any]()

    def tried(name: str, wanted: list[float] | None, run: Callable[[], list[float]]) -> list[float]:
        start, numbers = time.perf_counter(), list[float]()
        try:
            numbers = run()
            pairs = zip(numbers, numbers if wanted is None else wanted, strict=True)
            differs = max(abs(mine - other) / abs(other) for mine, other in pairs)
            outcome = "as DDP" if differs <= TOLERANCE else f"differs by {differs:.1e}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        found[name] = {"outcome": outcome, "seconds": time.perf_counter() - start}
        print(name, found[name], flush=True)
        return numbers

    def strategy(name: str, **more: Any) -> Any:
        return "ddp" if name == "DDP" else MistStrategy(profile_directory=str(folder), **PLANS[name], **more)

    names = ["DDP", *PLANS]
    paths = {name: folder / f"{number}.ckpt" for number, name in enumerate(names)}
    straight = tried("DDP", None, lambda: fit("ddp", folder, saved=paths["DDP"]))
    resumed = tried("DDP, from DDP's", None, lambda: fit("ddp", folder, start=paths["DDP"]))
    for name in PLANS:
        tried(name, straight, lambda name=name: fit(strategy(name), folder, saved=paths[name]))
    for name in PLANS:
        tried(f"{name}, from DDP's", resumed, lambda name=name: fit(strategy(name), folder, start=paths["DDP"]))
        tried(f"DDP, from {name}'s", resumed, lambda name=name: fit("ddp", folder, start=paths[name]))
        tried(f"{name}, from its own", resumed, lambda name=name: fit(strategy(name), folder, start=paths[name]))
    directory = folder / "directory.ckpt"
    tried(
        "pp 2, saving a directory",
        straight,
        lambda: fit(strategy("pp 2", save_distributed_checkpoint=True), folder, saved=directory),
    )
    tried("ZeRO-3, from pp 2's directory", resumed, lambda: fit(strategy("ZeRO-3"), folder, start=directory))
    if os.environ["RANK"] == "0" and given.out is not None:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
