"""Train a model whose parameters alone exceed the memory that each process may use.

Started in several processes by :mod:`benchmarks.launch`. The file has the limit, the bytes of all parameters, the plan,
predicted and measured peak bytes of every stage, and the loss of every step.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.record import ROOT
from lightning_mist import MistStrategy, SearchSpace
from lightning_mist.plan import to_json

SEARCHES = {
    "everything": SearchSpace(),
    "pipelines": SearchSpace(devices_per_stage=(1,)),
    "ZeRO-3": SearchSpace(num_stages=(1,), zero_stages=(3,)),
}
"""What the planner may choose from."""


class Losses(pl.Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def build(layers: int, width: int, length: int) -> pl.LightningModule:
    """The example's model with momentum SGD, whose state is as large as the parameters."""
    sys.path.insert(0, str(ROOT / "examples" / "byte_gpt"))
    from model import ByteGPT

    class Momentum(ByteGPT):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module: pl.LightningModule = Momentum(layers=layers, width=width, length=length)
    return module


def train(options: argparse.Namespace, world_size: int, folder: Path) -> dict[str, object]:
    """Plan and train."""
    sys.path.insert(0, str(ROOT / "examples" / "byte_gpt"))
    from data import StandardLibrary

    pl.seed_everything(0, verbose=False)
    with torch.device("meta"):
        all_bytes = sum(
            p.numel() * p.element_size() for p in build(options.layers, options.width, options.length).parameters()
        )
    limit = int(options.limit * all_bytes)
    strategy = MistStrategy(
        memory_limit=limit,
        search=SEARCHES[options.search],
        profile_directory=str(folder / "profiles"),
        plan_path=str(folder / "plan.json"),
    )
    losses = Losses()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_steps=options.steps,
        limit_val_batches=0,
        logger=False,
        callbacks=[losses],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    with trainer.init_module(empty_init=options.built == "empty"):
        module = build(options.layers, options.width, options.length)
    trainer.fit(module, StandardLibrary(length=options.length, batch_size=options.rows))
    plan, report = strategy.plan, strategy.report
    assert plan is not None
    assert report is not None
    return {
        "limit": limit,
        "all_bytes": all_bytes,
        "plan": json.loads(to_json(plan)),
        "predicted_bytes": [stage.predicted_bytes for stage in report.stages],
        "measured_bytes": [stage.measured_bytes for stage in report.stages],
        "losses": losses.losses,
    }


def main() -> None:
    """Run, and let rank 0 write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--built", choices=("empty", "ordinary"), required=True)
    parser.add_argument("--search", choices=tuple(SEARCHES), default="everything")
    parser.add_argument("--limit", type=float, default=0.95, help="in units of the bytes of all parameters")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--length", type=int, default=32, help="tokens per row")
    parser.add_argument("--rows", type=int, default=2, help="rows of each rank's batch")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        result = train(arguments, int(os.environ.get("WORLD_SIZE", "1")), Path(folder))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
