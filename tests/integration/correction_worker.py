"""Two fits in a row on two ranks: what the first measures corrects what the second is predicted by.

Run under torchrun with the folder for results as its argument.
"""

import json
import shutil
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy, SearchSpace
from lightning_mist.hardware import load_corrections
from tests.machine import assume_profile

STEPS, WIDTH = 14, 64


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.blocks(batch[0])).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(folder, plan):
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    shutil.rmtree(folder / "profiles" / "plans", ignore_errors=True)  # each fit is to plan anew
    strategy = MistStrategy(
        plan=plan,
        profile_directory=str(folder / "profiles"),
        plan_path=str(folder / "plan.json"),
        verbose=True,
        search=SearchSpace(num_stages=(2,), schedules=("1f1b",), checkpointing=False),
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(2 * 8 * STEPS, WIDTH)), batch_size=8))
    return strategy


def described(strategy):
    """What a fit had learned before, what it was predicted by, and what it taught."""
    basis, plan = strategy._decision.basis, strategy.plan
    found = {"plan": repr(plan), "times": [asdict(stage.measured_times) for stage in strategy.report.stages]}
    found["microbatches"] = plan.num_microbatches
    if basis is None:
        return found
    plain = replace(basis, corrections=())
    found["before"] = [asdict(item) for item in basis.corrections]
    found["after"] = [asdict(item) for item in strategy.report.corrections]
    kept, warning = load_corrections(basis.store)
    found["kept"], found["warning"] = [asdict(item) for item in kept], warning
    found["forward"] = [stage.forward_seconds for stage in plan.predicted.stages]
    found["uncorrected forward"] = [stage.forward_seconds for stage in plain.predict(plan).stages]
    found["action overhead"] = basis.profile.overheads.action_seconds
    return found


def main(folder):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    assume_profile(folder / "profiles", 2)
    first, second = (described(fit(folder, "auto")) for _ in range(2))
    given = described(fit(folder, str(folder / "plan.json")))
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps({"first": first, "second": second, "given": given}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
