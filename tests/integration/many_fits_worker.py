"""Fits again and again in the same two processes, and counts what stays.

Run by tests.ranks with a folder and a number of fits as arguments.
"""

import gc
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy, Plan, StagePlan
from lightning_mist.plan import StageMesh


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(folder):
    stages = tuple(
        StagePlan(layers=(2 * index, 2 * index + 2), mesh=StageMesh(devices=(index,)), microbatch_size=4)
        for index in range(2)
    )
    trainer = pl.Trainer(
        strategy=MistStrategy(plan=Plan(global_batch_size=8, num_microbatches=2, stages=stages)),
        accelerator="cpu",
        devices=2,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    # The optimizer's state comes from all ranks also when the fit's groups are gone.
    trainer.save_checkpoint(folder / "last.ckpt")


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder, counts = Path(sys.argv[1]), []
    for _ in range(int(sys.argv[2])):
        fit(folder)
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map)
        counts.append((groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
