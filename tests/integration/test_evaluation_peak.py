"""A model that no rank may hold whole is validated within the limit that it is trained in, as under DDP."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from lightning_mist.runtime.recording import StorageMeter, state_tensors
from tests.fits import make_trainer, plan
from tests.machine import assume_profile
from tests.tiers import tiered
from tests.workers import launched

WIDTH, LAYERS, ROWS, RANKS = 64, 12, 8, 4
SHARE = 1.1
"""Of the limit, that all parameters are."""

ALL = list(range(RANKS))
PLANS = {
    "zero3": plan([(LAYERS, ALL)], rows=ROWS, microbatches=1, zero=3),
    "pipeline": plan([(3, [rank]) for rank in ALL], rows=ROWS, microbatches=4),
    "mixed": plan([(6, [0, 1]), (6, [2, 3])], rows=ROWS, microbatches=2, zero=3),
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
        )
        self.validated: list[float] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch[0])
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def on_validation_batch_end(self, outputs: torch.Tensor, *_: Any) -> None:
        self.validated.append(float(outputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Metered(MistStrategy):
    """Meters from the start of a validation to its end."""

    def __init__(self, meter: StorageMeter, **options: Any) -> None:
        super().__init__(**options)
        self.meter = meter

    def on_validation_start(self) -> None:
        """Count from here on."""
        assert self.lightning_module is not None
        self.meter.observe(state_tensors(self.lightning_module, self.optimizers))
        self.meter.__enter__()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Count until here."""
        super().on_validation_end()
        self.meter.__exit__(None, None, None)


def validated(folder: Path, name: str) -> dict[str, Any]:
    """What a rank meters and sees of two epochs."""
    pl.seed_everything(0, verbose=False)
    module, meter = Net(), StorageMeter()
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    limit = int(held / SHARE)
    strategy: Any = "ddp"
    if name != "ddp":
        strategy = Metered(meter, plan=PLANS[name], memory_limit=limit, profile_directory=str(folder), self_check=False)
    trainer = make_trainer(strategy, max_epochs=2)
    rows = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(
        module,
        DataLoader(TensorDataset(rows), batch_size=ROWS),
        DataLoader(TensorDataset(rows[:75]), batch_size=ROWS),
    )
    return {
        "peak": meter.peak_bytes,
        "limit": limit,
        "held": held,
        "validated": module.validated,
        "logged": float(trainer.callback_metrics["val_loss"]),
    }


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
