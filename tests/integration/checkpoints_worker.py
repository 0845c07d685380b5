"""Fits that save and resume directories, by plan, in one set of processes for all of them.

Run by tests.ranks with a folder; every rank writes what it saw there.
"""

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.checkpoints.fits import fit, quiet
from lightning_mist import MistStrategy
from lightning_mist.errors import CheckpointError

DIRECTORY = {"save_distributed_checkpoint": True, "save_asynchronously": True}
PLANS = ("dp 2, ZeRO 1", "tp 2", "pp 2, zero bubble, all offloaded", "dp 2, ZeRO 3, all offloaded")


class Rank(pl.LightningModule):
    """A module whose buffer and metrics differ between ranks, so that their file names do, too."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.mean += 1.0 + self.global_rank
        self.log("rank", float(self.global_rank))
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def plain(folder, resumes=None):
    """Plain data parallelism: every rank has everything, and rank 0's buffers count."""
    pl.seed_everything(3, verbose=False)
    module = Rank()
    saves = pl.callbacks.ModelCheckpoint(folder / "plain", "{rank}", enable_version_counter=False)
    trainer = pl.Trainer(
        strategy=MistStrategy(save_distributed_checkpoint=True, broadcast_buffers=False, profile_directory=str(folder)),
        accelerator="cpu",
        devices=2,
        max_epochs=1 if resumes is None else 2,
        logger=False,
        callbacks=[saves],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=resumes)
    return {
        "mean": float(module.mean),
        "weights": module.layer.weight.tolist(),
        "is plain": trainer.strategy.plan.is_plain,
    }


def refused(folder, path):
    """What a damaged directory is, on this rank."""
    shard = sorted(path.glob("__*"))[-1]
    try:
        fit("pp 2, interleaved", folder, resumes=path)
        before = "resumed"
    except CheckpointError:
        before = "refused"
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        shard.unlink()
    torch.distributed.barrier()
    try:
        fit("pp 2, interleaved", folder, resumes=path)
    except CheckpointError as error:
        return [before, str(error).replace(str(path), "PATH")]
    return [before, "resumed"]


def main():
    quiet()
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    found = {}
    for index, plan in enumerate(PLANS):
        path = folder / f"{index}.ckpt"
        found[plan] = fit(plan, folder, saves_to=path, **DIRECTORY)
        then = PLANS[(index + 1) % len(PLANS)]
        found[f"{plan} -> {then}"] = fit(then, folder, resumes=path)
    found["plain"] = plain(folder)
    found["names"] = sorted(os.listdir(folder / "plain"))
    found["plain -> plain"] = plain(folder, folder / "plain" / found["names"][0])
    found["refused"] = refused(folder, folder / "0.ckpt")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
