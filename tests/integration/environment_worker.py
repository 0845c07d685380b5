"""A fit on two nodes of one process each, or on one of two; rank 0 writes the losses.

Arguments: how Lightning learns of the others (``slurm``, ``kubeflow``, ``by_hand``, on one node ``mpi``), the name of
the strategy, and a folder.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from tests.fits import make_trainer, plan, quiet


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.losses = []

    def training_step(self, batch, batch_idx):
        return (self.blocks(batch[0]) - 1).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def main():
    environment, name, folder = sys.argv[1:]
    quiet()
    pl.seed_everything(1, verbose=False)
    module = Net()
    trainer = make_trainer(
        MistStrategy(plan=plan([(2, [0]), (2, [1])], rows=4, microbatches=2)) if name == "mist" else name,
        devices=2 if environment == "mpi" else 1,
        num_nodes=1 if environment == "mpi" else 2,
        plugins=[KubeflowEnvironment()] if environment == "kubeflow" else None,
        max_epochs=2,
        default_root_dir=folder,
    )
    values = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(TensorDataset(values), batch_size=4))
    assert trainer.strategy.node_rank == (0 if environment == "mpi" else trainer.global_rank)
    if trainer.is_global_zero:
        known = type(trainer.strategy.cluster_environment).__name__
        Path(folder, f"{name}.json").write_text(json.dumps([known, module.losses]))


if __name__ == "__main__":
    main()
