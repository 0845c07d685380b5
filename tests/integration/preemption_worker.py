"""One rank of a job under SLURM's variables: fits and evaluations that are told once that their time is up."""

import json
import logging
import os
import signal
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from tests.fits import plan
from tests.ranks import run_ranks

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
    trainer = pl.Trainer(
        strategy=MistStrategy(plan=PLANS[how], profile_directory=str(folder), self_check=False),
        accelerator="cpu",
        devices=2,
        callbacks=[Tells(), pl.callbacks.LambdaCallback(**extra)] if extra else [Tells()],
        max_steps=STEPS,
        accumulate_grad_batches=2,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
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
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def run_job(folder, names):
    """Both ranks; what they found is in files of the folder afterwards."""
    (folder / "scontrol").write_text('#!/bin/sh\necho "$@" >> $ASKED\n')
    (folder / "scontrol").chmod(0o755)
    with (folder / "printed.txt").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run_ranks(2, lambda: rank_of_job(Path(folder), names), patience_seconds=20.0)
