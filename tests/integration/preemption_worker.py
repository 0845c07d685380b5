"""One rank of a job under SLURM's variables: trains, is told once that its time is up, and prints what came of it.

Arguments: how it is planned; a folder; the rank that gets the signal, in the middle of a step, or -1.
"""

import json
import logging
import os
import signal
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from lightning_mist.plan import Plan, StageMesh, StagePlan

TOLD_AT, STEPS = 4, 9


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first = None
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.blocks(batch[0])).pow(2).mean()

    def on_train_batch_start(self, batch, batch_idx):
        if self.first is None:
            self.first = batch_idx

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Told(pl.Callback):
    """In the first batch of a step of two."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == TOLD_AT:
            os.kill(os.getpid(), signal.SIGUSR1)


def strategy(how):
    if how == "plain":
        stages = (StagePlan(layers=(0, 4), mesh=StageMesh(devices=(0, 1), data_parallel_degree=2), microbatch_size=4),)
        return MistStrategy(plan=Plan(global_batch_size=8, num_microbatches=1, stages=stages))
    stages = tuple(
        StagePlan(layers=(2 * index, 2 * index + 2), mesh=StageMesh(devices=(1 - index,)), microbatch_size=4)
        for index in range(2)
    )
    return MistStrategy(plan=Plan(global_batch_size=8, num_microbatches=2, stages=stages))


def main():
    _, how, folder, told = sys.argv
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    module = Net()
    trainer = pl.Trainer(
        strategy=strategy(how),
        accelerator="cpu",
        devices=2,
        callbacks=[Told()] if told == os.environ["SLURM_PROCID"] else [],
        max_steps=STEPS,
        accumulate_grad_batches=2,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    # All batches are alike: a loader without state begins anew in a job that goes on in the middle of an epoch.
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).repeat(2 * STEPS, 1)
    trainer.fit(module, DataLoader(TensorDataset(values), batch_size=4))
    weights = [float(parameter.double().pow(2).sum()) for parameter in module.parameters()]
    print("RESULT", json.dumps({"first": module.first, "weights": weights}), flush=True)


if __name__ == "__main__":
    main()
