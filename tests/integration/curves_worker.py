"""Twenty optimizer steps of models of the zoo under DDP and under mist, in one set of processes for all of them.

Run by tests.ranks with a folder and ``name:plan`` pairs as arguments; every rank writes its losses there.
"""

import json
import logging
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist import MistStrategy
from lightning_mist.model import find_blocks
from tests import zoo

STEPS, ROWS = 20, 4

LAYOUTS = {
    "two": Layout(groups=(Group(), Group())),
    "split": Layout(groups=(Group(checkpointed=1), Group(checkpointed=1)), parts=2),
    "sharded": Layout(groups=(Group(dp=2, zero=1),)),
    "zero2": Layout(groups=(Group(dp=2, zero=2),), parts=2),
    "zero3": Layout(groups=(Group(dp=2, zero=3, checkpointed=1),), parts=2),
    "tensor": Layout(groups=(Group(tp=2),)),
    "sequence": Layout(groups=(Group(tp=2, sequence=True, checkpointed=1),)),
    "chunks": Layout(groups=(Group(), Group()), schedule="interleaved-1f1b", chunks=2),
    "grid": Layout(groups=(Group(tp=2), Group(tp=2, sequence=True))),
    "mixed": Layout(groups=(Group(dp=2, zero=3), Group(tp=2))),
    "hybrid": Layout(groups=(Group(dp=4, zero=2, shard=2),), parts=2),
    "tensor and shards": Layout(groups=(Group(dp=2, tp=2, zero=3),)),
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
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, eps=1e-4)


def plan(layout, layers):
    """The layout's plan with rank 0 in the last stage, where the planner puts it too."""
    made = make_plan(layout, layers, rows=ROWS)
    last, world = len(made.stages[-1].devices), made.world_size

    def turned(mesh):
        return replace(mesh, devices=tuple((device + last) % world for device in mesh.devices))

    return replace(made, stages=tuple(replace(stage, mesh=turned(stage.mesh)) for stage in made.stages))


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
        gradient_clip_val=0.3,
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
    results, ddp = {}, {}
    for pair in pairs:
        name, layout = pair.split(":")
        layers = len(find_blocks(zoo.make(name)[0]))
        mist = MistStrategy(plan=plan(LAYOUTS[layout], layers))
        if name not in ddp:
            ddp[name] = fit(name, "ddp", world, folder)
        results[pair] = {"ddp": ddp[name], "mist": fit(name, mist, world, folder)}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
