"""What planning does before there is a plan keeps within the memory that the plan keeps within."""

from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy, SearchSpace
from lightning_mist.runtime.recording import StorageMeter, state_tensors
from lightning_mist.strategy import strategy
from lightning_mist.strategy.planning import planning_state as planner
from lightning_mist.strategy.planning import trial_step as trials
from lightning_mist.strategy.planning import workflow as planning
from tests.fits import make_trainer
from tests.machine import assume_profile
from tests.tiers import tiered
from tests.workers import launched

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


def planned(folder, share):
    """What a rank sees of planning."""
    torch.manual_seed(0)
    module, meter = Net(), StorageMeter()
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    limit = int(held / share)
    decide = planning.decide

    def metered(*args, **kwargs):
        meter.observe(state_tensors(module))
        with meter:
            return decide(*args, **kwargs)

    trainer = make_trainer(
        MistStrategy(
            memory_limit=limit,
            profile_directory=str(folder),
            correct_profile=False,
            # Ways to share layers are checked in host memory, which is not what is metered.
            search=SearchSpace(tensor_parallel_degrees=(1,)),
        ),
        max_steps=2,
    )
    here = mock.Mock(return_value=False)
    with (
        mock.patch.object(strategy, "decide", metered),
        mock.patch.object(trials, "leaves_no_trace", here),
        mock.patch.object(planner, "timed_apart", here),
    ):
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=ROWS))
    plan = trainer.strategy._decision.plan
    return {
        "peak": meter.peak_bytes,
        "limit": limit,
        "held": held,
        "stages": plan.num_stages,
        "shards": int(plan.stages[0].zero_stage),
        "steps": trainer.global_step,
    }


@pytest.mark.parametrize("share", tiered((0.6, 0.4, 0.1), (0.6,)))
def test_planning_keeps_within_the_limit(tmp_path, share):
    assume_profile(tmp_path, 2)
    for report in launched(planned, tmp_path, share):
        assert report["held"] < report["peak"] <= report["limit"], report
        assert report["steps"] == 2
        # A module that is whole nowhere is not there to be tried; this one is, and is trained in parts of some kind.
        assert report["stages"] > 1 or report["shards"] == 3 or share < 0.5, report
