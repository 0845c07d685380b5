"""However processes are started, and in both copies of Lightning, a pipeline gives rank 0 what DDP gives it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.fits import plan, quiet
from tests.ranks import environment
from tests.tiers import tiered
from tests.workers import apart


class Steps:
    """What a module does, whichever copy of Lightning its other base is of."""

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


class Net(Steps, pl.LightningModule):
    """That of new Lightning, as those need it that pickle it."""


def fit(root, how, folder):
    """Metrics and weights of rank 0, of a two-stage pipeline on two processes, or of DDP."""
    quiet()
    lightning = importlib.import_module(root)
    lightning.seed_everything(1, verbose=False)
    strategy, kind = how, Net
    if root != "lightning.pytorch":
        kind = type("Net", (Steps, lightning.LightningModule), {})
    if how != "ddp_fork":
        home = "lightning" if root == "lightning.pytorch" else "pytorch_lightning"
        mist = importlib.import_module(f"lightning_mist.strategy.{home}").MistStrategy
        strategy = mist(plan=plan([(2, [1]), (2, [0])], rows=4, microbatches=2), start_method=how)
    module = kind()
    silent = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "default_root_dir": folder, **silent}
    trainer = lightning.Trainer(strategy=strategy, **options)
    values = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(values), batch_size=4)
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = [float(parameter.double().pow(2).sum()) for parameter in module.parameters()]
    return {"metrics": metrics, "weights": weights, "rank": trainer.global_rank}


def started(*arguments):
    """Of a program, which Lightning starts a second time."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next(found for found in printed if found["rank"] == 0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return apart(fit, "lightning.pytorch", "ddp_fork", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize(
    ("root", "how"),
    tiered(
        [("lightning.pytorch", "spawn"), ("lightning.pytorch", "fork"), ("pytorch_lightning", "popen")],
        [("lightning.pytorch", "fork")],
    ),
)
def test_results_come_back_as_under_ddp(tmp_path, expected, root, how):
    result = started(root, how, tmp_path) if how == "popen" else apart(fit, root, how, tmp_path)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-5)


if __name__ == "__main__":
    print(json.dumps(fit(sys.argv[1], sys.argv[2], Path(sys.argv[3]))), flush=True)
