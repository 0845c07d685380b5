"""A fit on ranks of several hosts: many parameters, few activations. Rank 0 writes what came of it.

Arguments: a folder, the strategy's name, and how many steps.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.fits import make_trainer, mist, quiet

WIDTH, LAYERS, ROWS, EPOCH = 512, 8, 4, 64
"""Of the model; rows of a rank's batch, and steps of an epoch."""

TRAINING = "training"
"""A named pipe, to which rank 0 writes after the third step if it is there."""


class Wide(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.losses, self.ends = [], []

    def training_step(self, batch, batch_idx):
        hidden = batch[0]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (self.head(hidden) - batch[1]).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.ends.append(time.monotonic())
        signpost = Path(self.trainer.default_root_dir, TRAINING)
        if self.trainer.global_step == 3 and self.trainer.is_global_zero and signpost.exists():
            signpost.write_text("here")

    def configure_optimizers(self):
        # Where gradients are small Adam's first steps make of any rounding a whole step.
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


def strategy_of(name, folder):
    if name != "mist":
        return name
    return mist(folder, "auto", report_path=str(folder / "report.json"))


def fit(folder, name, steps):
    torch.set_num_threads(1)
    quiet()
    pl.seed_everything(1, verbose=False)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = make_trainer(
        strategy_of(name, folder),
        devices=per_node,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_node,
        max_epochs=-1,
        max_steps=steps,
        default_root_dir=folder,
    )
    values = torch.randn(ROWS * 4 * EPOCH, WIDTH, generator=torch.Generator().manual_seed(0))
    module = Wide()
    trainer.fit(module, DataLoader(TensorDataset(values, values.mean(1, keepdim=True)), batch_size=ROWS))
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if trainer.is_global_zero:
        result = {"hosts": hosts, "losses": module.losses, "ends": module.ends}
        (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    fit(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
