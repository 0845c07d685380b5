"""One fit of a two-stage pipeline on two processes, started as the arguments say; prints what came of it as JSON.

Arguments: ``lightning.pytorch`` or ``pytorch_lightning``; ``ddp_fork``, ``popen``, ``spawn`` or ``fork``; a folder.
"""

import importlib
import json
import logging
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist.plan import Plan, StageMesh, StagePlan

pl = importlib.import_module(sys.argv[1])


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.blocks(batch[0])).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.head(self.blocks(batch[0])).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def main():
    _, root, how, folder = sys.argv
    warnings.filterwarnings("ignore")
    logging.getLogger(root).setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    strategy = how
    if how != "ddp_fork":
        home = "lightning" if root == "lightning.pytorch" else "pytorch_lightning"
        mist = importlib.import_module(f"lightning_mist.strategy.{home}").MistStrategy
        stages = tuple(
            StagePlan(layers=(2 * index, 2 * index + 2), mesh=StageMesh(devices=(1 - index,)), microbatch_size=4)
            for index in range(2)
        )
        strategy = mist(plan=Plan(global_batch_size=8, num_microbatches=2, stages=stages), start_method=how)
    module = Net()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    values = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(values), batch_size=4)
    trainer.fit(module, loader, loader)
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        weights = [float(parameter.double().pow(2).sum()) for parameter in module.parameters()]
        print("RESULT", json.dumps({"metrics": metrics, "weights": weights}), flush=True)


if __name__ == "__main__":
    main()
