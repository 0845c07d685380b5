"""One training run, timed: the byte-level GPT of ``examples/byte_gpt`` under Lightning's DDP or under mist.

Started in several processes by :mod:`benchmarks.launch`. Both strategies are timed by the same clock, from the end of
one batch to the end of the next, loading included; the first steps are left out, as they make the optimizer's state,
choose algorithms, and in mist meter memory.
"""

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.record import ROOT

WARM_UP_STEPS = 6
"""Steps left out; the one in which mist meters memory is among them."""


class Times(pl.Callback):
    """Wall time and loss of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))

    def seconds(self) -> list[float]:
        ends = self.ends[WARM_UP_STEPS - 1 :]
        return [later - earlier for earlier, later in itertools.pairwise(ends)]


def example(options: argparse.Namespace) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """The example's own module and data, unmodified."""
    sys.path.insert(0, str(ROOT / "examples" / "byte_gpt"))
    from data import StandardLibrary
    from model import ByteGPT

    module = ByteGPT(layers=options.layers, width=options.width, length=options.length)
    return module, StandardLibrary(length=options.length, batch_size=options.batch_size)


def strategy(options: argparse.Namespace, report: Path) -> Any:
    """What the run is to be compared by."""
    if options.strategy == "ddp":
        return "ddp"
    from lightning_mist import MistStrategy

    plan = "auto" if options.plan is None else str(options.plan)
    return MistStrategy(plan=plan, report_path=str(report), self_check=False)


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes of the example."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8, help="rows per process")
    parser.add_argument("--precision", default="32-true")


def size_arguments(options: argparse.Namespace) -> list[str]:
    """The same as a command line."""
    names = ("layers", "width", "length", "batch_size", "precision")
    return [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def main() -> None:
    """Train and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("ddp", "mist"), required=True)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    add_size_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    pl.seed_everything(0, verbose=False)
    module, data = example(options)
    times, report = Times(), options.out.with_suffix(".report")
    trainer = pl.Trainer(
        strategy=strategy(options, report),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else int(os.environ["LOCAL_WORLD_SIZE"]),
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        content = {
            "step_seconds": times.seconds(),
            "losses": times.losses,
            "report": json.loads(report.read_text()) if report.is_file() else None,
        }
        options.out.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
