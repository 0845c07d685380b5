"""A job that SLURM ends is saved first, by all ranks at one place, and goes on from there."""

import os
import signal

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from tests.fits import make_trainer, plan
from tests.tiers import asked_for, tiered
from tests.workers import launched

ROWS, LAYERS, STEPS = 4, 4, 9

PLANS = {
    "pipeline": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=2),
    "plain": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1),
    "sharded": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=3),
}

SITUATIONS = {
    "in a step of two, pipeline, rank 1": ("pipeline", "fit", "end of batch 4", (1,)),
    "in a step of two, pipeline, rank 0": ("pipeline", "fit", "end of batch 4", (0,)),
    "in a step of two, plain, rank 1": ("plain", "fit", "end of batch 4", (1,)),
    "in the last batch": ("sharded", "fit", "end of batch 17", (1,)),
    "while planning": ("plain", "fit", "loader", (0,)),
    "before training": ("sharded", "fit", "validation 0 of check", (1,)),
    "in validation, plain": ("plain", "fit", "validation 1", (1,)),
    "in validation, sharded": ("sharded", "fit", "validation 1", (1,)),
    "in validation, pipeline, longer here": ("pipeline", "fit", "validation 3", (1,)),
    "in validation, plain, longer here": ("plain", "fit", "validation 4", (1,)),
    "in validation, whole": ("whole", "fit", "validation 1", (0, 1)),
    "in validation alone": ("sharded", "validate", "validation 1", (0,)),
    "in a test alone": ("plain", "test", "test 1", (1,)),
    "in prediction alone": ("sharded", "predict", "predict 1", (0, 1)),
}
"""Plan, what is done, where it is told, which ranks are."""


class Net(pl.LightningModule):
    def __init__(self, told_at=""):
        super().__init__()
        self.told_at, self.first, self.validated = told_at, None, 0
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(LAYERS)]
        )
        self.head = nn.Linear(6, 1)

    def tell(self, here):
        if here == self.told_at:
            self.told_at = ""
            os.kill(os.getpid(), signal.SIGUSR1)

    def loss(self, batch):
        return self.head(self.blocks(batch[0])).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("tested", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.head(self.blocks(batch[0]))

    def train_dataloader(self):
        self.tell("loader")
        # All batches are alike: a loader without state begins anew in a job that goes on in the middle of an epoch.
        return data(2 * STEPS)

    def on_train_batch_start(self, batch, batch_idx):
        if self.first is None:
            self.first = batch_idx

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Tells(pl.Callback):
    """Tells in the middle of a step, or at the beginning of a batch of an evaluation."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.tell(f"end of batch {batch_idx}")

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        module.tell(f"validation {batch_idx}" + (" of check" if trainer.sanity_checking else ""))

    def on_test_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        module.tell(f"test {batch_idx}")

    def on_predict_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        module.tell(f"predict {batch_idx}")


def data(batches):
    values = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0)).repeat(batches, 1)
    return DataLoader(TensorDataset(values), batch_size=ROWS)


def work(name, folder, *, is_again=False):
    how, kind, told_at, told = SITUATIONS[name]
    rank = int(os.environ["RANK"])
    pl.seed_everything(1, verbose=False)
    module = Net(told_at if rank in told and not is_again else "")
    extra = {}
    if how == "whole":
        extra, how = {"on_validation_end": lambda *_: sum(item.sum() for item in module.parameters())}, "sharded"
    trainer = make_trainer(
        MistStrategy(plan=PLANS[how], profile_directory=str(folder), self_check=False),
        callbacks=[Tells(), pl.callbacks.LambdaCallback(**extra)] if extra else [Tells()],
        max_steps=STEPS,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    # Rank 1 has two batches more to validate: ranks are at different places when they are told.
    validated = data(3 + 2 * rank)
    if kind == "fit":
        trainer.fit(module, val_dataloaders=validated)
    else:
        getattr(trainer, kind)(module, validated, **({} if kind == "predict" else {"verbose": False}))
    weights = [float(parameter.double().pow(2).sum()) for parameter in module.parameters()]
    return {"first": module.first, "weights": weights, "handler": str(int(signal.getsignal(signal.SIGUSR1)))}


def rank_of_job(folder, names):
    rank = os.environ["RANK"]
    del os.environ["TORCHELASTIC_RUN_ID"]
    slurm = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "JOB_NAME": "training", "JOB_ID": "4711", "PROCID": rank}
    os.environ.update({f"SLURM_{name}": value for name, value in {**slurm, "LOCALID": rank, "NODEID": "0"}.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    found = {}
    for number, name in enumerate(names):
        place = folder / str(number)
        (place / "again").mkdir(parents=True, exist_ok=True)
        os.environ["ASKED"] = str(place / "asked")
        first = work(name, place)
        torch.distributed.barrier()
        files = [path.name for path in place.glob("*.ckpt")]
        if not files:
            found[name] = {"files": files}
            continue
        saved = torch.load(place / files[0], weights_only=False)
        found[name] = {
            "files": files,
            "asked": (place / "asked").read_text(),
            "step": saved["global_step"],
            **first,
            "evaluated": saved["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["current"],
            "sum": float(sum(value.double().pow(2).sum() for value in saved["state_dict"].values())),
        }
        if SITUATIONS[name][1] == "fit":
            found[name]["again"] = work(name, place, is_again=True)
    return found


IN_TRAINING = {"end of batch 4": (3, 6), "end of batch 17": (STEPS, None), "loader": (0, 0)}
"""Steps that have been taken, and the first batch of what goes on. Batch 4 is the first of the third step of two."""

BATCHES_OF_RANK_0 = 3

FIRST = (
    "in a step of two, pipeline, rank 1",
    "in the last batch",
    "while planning",
    "in validation, plain",
    "in validation, sharded",
    "in validation, pipeline, longer here",
    "in validation, plain, longer here",
    "in validation alone",
)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "scontrol").write_text('#!/bin/sh\necho "$@" >> $ASKED\n')
    (folder / "scontrol").chmod(0o755)
    return launched(rank_of_job, folder, asked_for(request, "name"))


@pytest.mark.parametrize("name", tiered(SITUATIONS, FIRST))
def test_whoever_is_told_all_save_at_one_place_and_go_on_from_there(found, name):
    _, kind, place, _ = SITUATIONS[name]
    ranks = [rank[name] for rank in found]
    for rank in ranks:
        assert rank["files"] == ["hpc_ckpt_1.ckpt"]
        assert rank["asked"] == "requeue 4711\n"
        assert rank["handler"] == "0"  # the system's own
    saved = ranks[0]
    if kind == "fit":
        assert [rank["again"]["weights"] for rank in ranks] == [rank["weights"] for rank in ranks]
    else:
        assert saved["sum"] == pytest.approx(sum(saved["weights"]))
    if place in IN_TRAINING:
        assert (saved["step"], *(rank["again"]["first"] for rank in ranks)) == (
            IN_TRAINING[place][0],
            *([IN_TRAINING[place][1]] * 2),
        )
    elif kind == "fit":
        assert saved["step"] == (0 if "check" in place else STEPS)
        batch = min(int(place.split()[1]), BATCHES_OF_RANK_0)
        is_at_end = batch == BATCHES_OF_RANK_0
        # As if Lightning had saved in the step of that batch: it is finished where training goes on.
        assert saved["evaluated"] == {
            **dict.fromkeys(("ready", "started"), batch + (not is_at_end)),
            **dict.fromkeys(("processed", "completed"), batch),
        }
