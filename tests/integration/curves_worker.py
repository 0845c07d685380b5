"""Twenty optimizer steps of models of the zoo under DDP and under mist, in one set of processes for all of them.

Run by torchrun with a folder and ``name:plan`` pairs as arguments; every rank writes its losses there.
"""

import json
import logging
import os
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_mist import MistStrategy
from lightning_mist.model import find_blocks
from lightning_mist.plan import Checkpointing, Plan, StageMesh, StagePlan, ZeroStage
from tests import zoo

STEPS, ROWS = 20, 4

LAYOUTS = {
    "two": {"devices": [[1], [0]], "microbatches": 2},
    "split": {"devices": [[1], [0]], "microbatches": 4, "checkpointed": 1},
    "sharded": {"devices": [[0, 1]], "microbatches": 1, "zero": 1},
    "zero2": {"devices": [[0, 1]], "microbatches": 2, "zero": 2},
    "zero3": {"devices": [[0, 1]], "microbatches": 2, "zero": 3, "checkpointed": 1},
}


class Curve(pl.LightningModule):
    """Trains a model of the zoo as an ordinary Lightning project would."""

    def __init__(self, name):
        super().__init__()
        self.model, self.make_batch = zoo.make(name)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = zoo.loss_of(self.model.training_step(batch, batch_idx))
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def plan(layout, layers, world):
    stages, bounds = [], [layers * index // len(layout["devices"]) for index in range(len(layout["devices"]) + 1)]
    for devices, layer_range in zip(layout["devices"], pairwise(bounds), strict=True):
        stages.append(
            StagePlan(
                layers=layer_range,
                mesh=StageMesh(devices=tuple(devices), data_parallel_degree=len(devices)),
                microbatch_size=ROWS * world // (layout["microbatches"] * len(devices)),
                zero_stage=ZeroStage(layout.get("zero", 0)),
                checkpointing=Checkpointing(layers=layout.get("checkpointed", 0)),
            )
        )
    return Plan(global_batch_size=ROWS * world, num_microbatches=layout["microbatches"], stages=tuple(stages))


def fit(name, strategy, world, folder):
    pl.seed_everything(2, verbose=False)
    module = Curve(name)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    batches = [module.make_batch(ROWS) for _ in range(STEPS)]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.losses


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder, pairs = Path(sys.argv[1]), sys.argv[2:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    for pair in pairs:
        name, layout = pair.split(":")
        layers = len(find_blocks(zoo.make(name)[0]))
        mist = MistStrategy(plan=plan(LAYOUTS[layout], layers, world))
        results[pair] = {"ddp": fit(name, "ddp", world, folder), "mist": fit(name, mist, world, folder)}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
