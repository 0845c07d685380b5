"""Directories that two processes write while training goes on: what resumes from them, and what is refused of them."""

import os

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.checkpoints.fits import STEPS, fit
from lightning_mist import MistStrategy
from lightning_mist.errors import CheckpointError
from tests.fits import make_trainer
from tests.workers import launched

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
    trainer = make_trainer(
        MistStrategy(save_distributed_checkpoint=True, broadcast_buffers=False, profile_directory=str(folder)),
        max_epochs=1 if resumes is None else 2,
        callbacks=[saves],
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


def written(folder):
    """What a rank sees of fits that save and resume directories."""
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
    return found


pytestmark = pytest.mark.thorough  # in the first tier, ranks of one process write and read directories


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return launched(written, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("index", range(len(PLANS)))
def test_another_plan_goes_on_from_what_was_written_while_training_went_on(seen, index):
    first, second = PLANS[index], PLANS[(index + 1) % len(PLANS)]
    for rank in seen:
        assert rank[f"{first} -> {second}"] == pytest.approx(rank[first][STEPS:], rel=1e-10)
    assert seen[0][first] == seen[1][first]


def test_plain_data_parallelism_has_the_buffers_and_the_names_of_rank_0(seen):
    assert seen[0]["names"] == ["rank=0.0.ckpt"]
    first, second = (rank["plain"] for rank in seen)
    assert first["is plain"]
    assert first["weights"] == second["weights"]
    assert (first["mean"], second["mean"]) == (3.0, 6.0)
    # Both have read rank 0's.
    assert [rank["plain -> plain"]["mean"] for rank in seen] == [3.0 + 3.0, 3.0 + 6.0]


def test_a_missing_shard_is_refused_on_every_rank(seen):
    for rank in seen:
        before, error = rank["refused"]
        assert before == "resumed"
        assert error.startswith("PATH/__1_0.distcp is missing: .metadata says that")
