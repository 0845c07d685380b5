"""A model that no rank may hold whole is planned and validated within the limit that it is trained in."""

from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy, SearchSpace
from lightning_mist.runtime.recording import StorageMeter, state_tensors
from lightning_mist.strategy.planning import planning_state, trial_step, workflow
from tests.fits import make_trainer, plan
from tests.machine import assume_profile
from tests.tiers import tiered
from tests.workers import launched

LAYERS, ROWS, RANKS = 16, 8, 4
SHARE = 1.1
"""Of the limit, that all parameters are where a model is validated."""

ALL = list(range(RANKS))
PLANS = {
    "zero3": plan([(LAYERS, ALL)], rows=ROWS, microbatches=1, zero=3),
    "pipeline": plan([(4, [rank]) for rank in ALL], rows=ROWS, microbatches=4),
    "mixed": plan([(8, [0, 1]), (8, [2, 3])], rows=ROWS, microbatches=2, zero=3),
}


class Net(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(LAYERS)]
        )
        self.held = sum(p.numel() * p.element_size() for p in self.parameters())
        self.validated = []

    def training_step(self, batch, batch_idx):
        hidden = batch[0]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.pow(2).mean()

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def on_validation_batch_end(self, outputs, *_):
        self.validated.append(float(outputs))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def data(rows):
    return DataLoader(TensorDataset(rows), batch_size=ROWS)


def planned(folder, share):
    """What a rank sees of planning."""
    torch.manual_seed(0)
    module, meter = Net(128), StorageMeter()
    limit = int(module.held / share)
    decide = workflow.decide

    def metered(*args, **kwargs):
        meter.observe(state_tensors(module))
        with meter:
            return decide(*args, **kwargs)

    strategy = MistStrategy(
        memory_limit=limit,
        profile_directory=str(folder),
        correct_profile=False,
        # Ways to share layers are checked in host memory, which is not what is metered.
        search=SearchSpace(tensor_parallel_degrees=(1,)),
    )
    trainer = make_trainer(strategy, max_steps=2, limit_val_batches=0)
    here = mock.Mock(return_value=False)
    with (
        mock.patch.object(workflow, "decide", metered),
        mock.patch.object(trial_step, "leaves_no_trace", here),
        mock.patch.object(planning_state, "timed_apart", here),
    ):
        trainer.fit(module, data(torch.randn(64, 128)))
    made = strategy._decision.plan
    is_in_parts = made.num_stages > 1 or int(made.stages[0].zero_stage) == 3
    found = {"peak": meter.peak_bytes, "limit": limit, "held": module.held, "steps": trainer.global_step}
    return {**found, "is in parts": is_in_parts}


@pytest.mark.parametrize("share", tiered((0.6, 0.4, 0.1), (0.6,)))
def test_planning_keeps_within_the_limit(tmp_path, share):
    """What it does before there is a plan keeps within the memory that the plan keeps within."""
    assume_profile(tmp_path, 2)
    for report in launched(planned, tmp_path, share):
        assert report["held"] < report["peak"] <= report["limit"], report
        assert report["steps"] == 2
        # A module that is whole nowhere is not there to be tried; this one is, and is trained in parts of some kind.
        assert report["is in parts"] or share < 0.5, report


class Metered(MistStrategy):
    """Meters from the start of a validation to its end."""

    def __init__(self, meter, **options):
        super().__init__(**options)
        self.meter = meter

    def on_validation_start(self):
        """Count from here on."""
        self.meter.observe(state_tensors(self.lightning_module, self.optimizers))
        self.meter.__enter__()
        super().on_validation_start()

    def on_validation_end(self):
        """Count until here."""
        super().on_validation_end()
        self.meter.__exit__(None, None, None)


def validated(folder, name):
    """What a rank meters and sees of two epochs."""
    pl.seed_everything(0, verbose=False)
    module, meter = Net(64), StorageMeter()
    limit, strategy = int(module.held / SHARE), "ddp"
    if name != "ddp":
        strategy = Metered(meter, plan=PLANS[name], memory_limit=limit, profile_directory=str(folder), self_check=False)
    trainer = make_trainer(strategy, max_epochs=2)
    rows = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, data(rows), data(rows[:75]))
    logged = float(trainer.callback_metrics["val_loss"])
    found = {"validated": module.validated, "logged": logged}
    return {**found, "peak": meter.peak_bytes, "limit": limit, "held": module.held}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return launched(validated, tmp_path_factory.mktemp("ddp"), "ddp", world=RANKS)


@pytest.mark.parametrize("name", tiered(PLANS, ("mixed",)))
def test_validation_keeps_within_the_limit(tmp_path, ddp, name):
    assume_profile(tmp_path, RANKS)
    for wanted, report in zip(ddp, launched(validated, tmp_path, name, world=RANKS), strict=True):
        assert 0 < report["peak"] < report["limit"] < report["held"], report
        assert report["validated"] == pytest.approx(wanted["validated"], rel=1e-5)
        assert report["logged"] == pytest.approx(wanted["logged"], rel=1e-5)
