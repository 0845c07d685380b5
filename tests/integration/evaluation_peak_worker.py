"""Validates during fit a model of which the parameters alone are more than may be used, and meters what it takes.

Run by tests.ranks with a folder and the name of a plan as arguments.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from lightning_mist.runtime.recording.meter import StorageMeter, state_tensors
from tests.fits import plan

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


def main() -> None:
    """Fit two epochs, and write what was metered and seen."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder, name = Path(sys.argv[1]), sys.argv[2]
    pl.seed_everything(0, verbose=False)
    module, meter = Net(), StorageMeter()
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    limit = int(held / SHARE)
    strategy: Any = "ddp"
    if name != "ddp":
        strategy = Metered(meter, plan=PLANS[name], memory_limit=limit, profile_directory=str(folder), self_check=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(
        module,
        DataLoader(TensorDataset(rows), batch_size=ROWS),
        DataLoader(TensorDataset(rows[:75]), batch_size=ROWS),
    )
    report = {"peak": meter.peak_bytes, "limit": limit, "held": held, "validated": module.validated}
    report["logged"] = float(trainer.callback_metrics["val_loss"])
    (folder / f"{name}{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
