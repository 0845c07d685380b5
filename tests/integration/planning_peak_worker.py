"""Plans for a model of which the parameters alone are most of what may be used, and meters what planning takes.

Run by tests.ranks with a folder and the share of the limit that the parameters are as arguments. On a CPU what planning
tries on real numbers is tried in copies of the process; here it is tried where the meter sees it, as on a device.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy, SearchSpace
from lightning_mist.runtime.recording.meter import StorageMeter, state_tensors
from lightning_mist.strategy import strategy
from lightning_mist.strategy.planning import planning_state as planner
from lightning_mist.strategy.planning import trial_step as trials
from lightning_mist.strategy.planning import workflow as planning

WIDTH, LAYERS, ROWS = 128, 12, 8


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
        )

    def training_step(self, batch, batch_idx):
        h = batch[0]
        for block in self.blocks:
            h = h + block(h)
        return h.pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder, share = Path(sys.argv[1]), float(sys.argv[2])
    torch.manual_seed(0)
    module, meter = Net(), StorageMeter()
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    limit = int(held / share)
    decide = planning.decide

    def metered(*args, **kwargs):
        meter.observe(state_tensors(module))
        with meter:
            return decide(*args, **kwargs)

    trainer = pl.Trainer(
        strategy=MistStrategy(
            memory_limit=limit,
            profile_directory=str(folder),
            correct_profile=False,
            # Ways to share layers are checked in host memory, which is not what is metered.
            search=SearchSpace(tensor_parallel_degrees=(1,)),
        ),
        accelerator="cpu",
        devices=2,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    here = mock.Mock(return_value=False)
    with (
        mock.patch.object(strategy, "decide", metered),
        mock.patch.object(trials, "leaves_no_trace", here),
        mock.patch.object(planner, "timed_apart", here),
    ):
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=ROWS))
    plan = trainer.strategy._decision.plan
    report = {
        "peak": meter.peak_bytes,
        "limit": limit,
        "held": held,
        "stages": plan.num_stages,
        "shards": int(plan.stages[0].zero_stage),
        "parts": plan.num_microbatches,
        "steps": trainer.global_step,
    }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
