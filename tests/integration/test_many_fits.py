"""Nothing that a fit makes outlives it: neither groups of processes, nor threads, nor files."""

import gc
import os

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from tests.fits import make_trainer, plan
from tests.tiers import tiered
from tests.workers import launched


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(folder):
    given = plan([(2, [0]), (2, [1])], rows=4, microbatches=2)
    trainer = make_trainer(MistStrategy(plan=given), max_steps=3)
    module = Net()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    # The optimizer's state comes from all ranks also when the fit's groups are gone.
    trainer.save_checkpoint(folder / "last.ckpt")


def left_by(fits, folder):
    """Groups, threads and files of a rank after each fit."""
    counts = []
    for _ in range(fits):
        fit(folder)
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map)
        counts.append((groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


@pytest.mark.parametrize("fits", tiered((4, 20), (4,)))
def test_many_fits_leave_as_much_as_one(tmp_path, fits):
    for counts in launched(left_by, fits, tmp_path):
        assert len(counts) == fits
        groups, threads, files = zip(*counts[1:], strict=True)  # the first makes what the process has from then on
        assert set(groups) == {1}
        assert set(threads) == {threads[0]}
        assert max(files) == files[0]  # sockets that were closed may be gone a little later
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    assert len(saved) == 8
    assert all(entry["exp_avg"].abs().sum() > 0 for entry in saved.values())
