"""What was interrupted goes on as under DDP: wherever it ended, however it was saved, under any plan.

A case is ``way|hook|epoch|batch|loader|option|plan``:

* way: ``error`` and ``SIGTERM`` end training and save (``OnExceptionCheckpoint``); ``requeue`` is SLURM's signal, which
  saves and lets training go on; ``saves`` is a ``ModelCheckpoint`` that saves each step, and an error later.
* hook, epoch, batch: where. ``validation_step`` is in a validation; its batch is that of training before it.
"""

import json
import os
import random
import signal
from itertools import combinations, islice, product

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from tests.fits import make_trainer, plan
from tests.machine import assume_profile
from tests.workers import apart, forked

ROWS, WIDTH, LAYERS, BATCHES, EPOCHS = 4, 4, 4, 6, 3
PATIENCE_SECONDS = 120.0

PLANS = {
    "auto": "auto",
    "zero3": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=3, checkpointed=1),
    "pp2": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=2),
}
OPTIONS = {
    "plain": {},
    "without validation": {"limit_val_batches": 0},
    "accumulate": {"accumulate_grad_batches": 2},
    "interval": {"val_check_interval": 2},
    "over epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "limit": {"limit_train_batches": 4},
    "steps": {"max_epochs": -1, "max_steps": 14},
}


class Stateful(DataLoader):
    """Goes on where it was saved."""

    start, given = 0, 0

    def __iter__(self):
        first, self.given = self.given, 0
        self.start = first
        for batch in islice(super().__iter__(), first, None):
            self.start += 1
            yield batch

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.given = state["start"]


def loader(kind, rows, *, shuffle):
    data = TensorDataset(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).double())
    make = Stateful if kind == "stateful" else DataLoader
    return make(data, batch_size=ROWS, shuffle=shuffle, num_workers=int(kind == "workers"))


class Net(pl.LightningModule):
    """Keeps which batches it trains on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 1)
        self.double()
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        return self.head(self.blocks(batch[0])).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.head(self.blocks(batch[0])).pow(2).mean(), sync_dist=True)

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += [self.trainer.current_epoch, batch_idx, self.trainer.global_step, float(batch[0].sum())]

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validated += [self.trainer.current_epoch, self.trainer.global_step]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Interrupts(Callback):
    def __init__(self, way, hook, epoch, batch, rank):
        self.way, self.hook, self.epoch, self.batch, self.rank = way, hook, epoch, batch, rank
        self.here, self.has_come = -1, False

    def at(self, hook, trainer):
        is_here = trainer.current_epoch == self.epoch and ("epoch" in hook or self.here == self.batch)
        if hook != self.hook or self.has_come or not is_here or trainer.sanity_checking:
            return
        self.has_come = True
        if self.way in ("error", "saves"):
            raise RuntimeError("a bad sample")
        if self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), signal.SIGTERM if self.way == "SIGTERM" else signal.SIGUSR1)

    def stand_before_steps_of(self, trainer):
        """In the middle of a validation, without a change of the module's step."""
        step = trainer.strategy.validation_step

        def validation_step(batch, batch_idx):
            if batch_idx == 1:
                self.at("validation_step", trainer)
            return step(batch, batch_idx)

        trainer.strategy.validation_step = validation_step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.here = batch_idx
        self.at("on_train_batch_start", trainer)

    def on_before_optimizer_step(self, trainer, *rest):
        self.at("on_before_optimizer_step", trainer)

    def on_train_batch_end(self, trainer, *rest):
        self.at("on_train_batch_end", trainer)

    def on_validation_batch_start(self, trainer, *rest):
        self.at("on_validation_batch_start", trainer)

    def on_validation_end(self, trainer, *rest):
        self.at("on_validation_end", trainer)

    def on_train_epoch_start(self, trainer, *rest):
        self.at("on_train_epoch_start", trainer)

    def on_train_epoch_end(self, trainer, *rest):
        self.at("on_train_epoch_end", trainer)


def fit(case, strategy, folder, *, is_again=False):
    way, hook, epoch, batch, kind, option, _ = case.split("|")
    pl.seed_everything(3, verbose=False)
    # Under DDP the others would wait in the handler for ever.
    rank = int(way[-1]) if way[-1].isdigit() and strategy != "ddp" else None
    interrupts = Interrupts(way.rstrip("01"), hook, int(epoch), int(batch), rank)
    module = Net()
    saves = {
        "saves": lambda: ModelCheckpoint(
            folder, "step{step}", auto_insert_metric_name=False, every_n_train_steps=1, save_top_k=-1
        ),
        "error": lambda: OnExceptionCheckpoint(folder, "bad"),
        "SIGTERM": lambda: OnExceptionCheckpoint(folder, "bad"),
    }.get(interrupts.way)
    callbacks = [] if is_again else [interrupts, *([saves()] if saves else [])]
    trainer = make_trainer(
        strategy,
        callbacks=callbacks,
        enable_checkpointing=any(not isinstance(item, Interrupts) for item in callbacks),
        default_root_dir=folder,
        **{"max_epochs": EPOCHS, **OPTIONS[option]},
    )
    if not is_again:
        interrupts.stand_before_steps_of(trainer)
    given = {}
    if is_again and interrupts.way != "requeue":
        given["ckpt_path"] = last(folder) if interrupts.way == "saves" else folder / "bad.ckpt"
    data = loader(kind, 2 * ROWS * BATCHES, shuffle=True), loader("", 2 * ROWS * 3, shuffle=False)
    try:
        trainer.fit(module, *data, **given)
    except (RuntimeError, BaseException) as error:
        if type(error).__name__ != "SIGTERMException" and str(error) != "a bad sample":
            raise
    return module, trainer


def last(folder):
    return max(folder.glob("*.ckpt"), key=lambda path: (len(path.name), path.name))


def strategy_of(name, folder):
    if name == "ddp":
        return "ddp"
    return MistStrategy(
        plan=PLANS[name],
        profile_directory=str(assume_profile(folder / "profiles", 2)),
        plan_path=str(folder / "plan.json"),
        self_check=False,
    )


def one(case, name, folder):
    """What a rank sees of the second fit."""
    torch.set_num_threads(1)
    if case.startswith("requeue"):
        rank = os.environ["RANK"]
        del os.environ["TORCHELASTIC_RUN_ID"]
        os.environ.update(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_JOB_NAME="training", SLURM_JOB_ID="4711")
        os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0", MASTER_ADDR="127.0.0.1")
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        if rank == "0":
            (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
            (folder / "scontrol").chmod(0o755)
    fit(case, strategy_of(name, folder), folder)
    module, trainer = fit(case, strategy_of(name, folder), folder, is_again=True)
    found = {
        "saved": sorted(path.name for path in folder.glob("*.ckpt")),
        "batches": module.seen,
        "validated": module.validated,
        "steps": [trainer.global_step, trainer.current_epoch],
        "weights": torch.cat([item.detach().flatten() for item in module.parameters()]).tolist(),
    }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def both(case, name, folder):
    """What both ranks saw, or ``None``, and what was printed."""
    found, is_late, printed = forked(lambda: one(case, name, folder), folder, seconds=PATIENCE_SECONDS)
    return found, "HANG " * is_late + printed


def difference(wanted, found):
    """In what two runs differ; empty if they do not."""
    if None in found or None in wanted:
        return f"ended: {[item is None for item in wanted]} under DDP, {[item is None for item in found]} here"
    for rank in range(2):
        for name, value in wanted[rank].items():
            other = found[rank][name]
            is_same = (
                value == other
                if name != "weights"
                else max(abs(a - b) for a, b in zip(value, other, strict=True)) < 1e-10
            )
            if not is_same:
                return f"rank {rank}: {name}: {str(value)[:300]} under DDP, {str(other)[:300]} here"
    return ""


def outcomes(cases, folder):
    """For every case in what it differs from DDP, and what was printed."""
    made, wanted = {}, {}
    for number, case in enumerate(cases):
        same = case.rpartition("|")[0]
        if same not in wanted:
            wanted[same] = both(case, "ddp", folder / f"{number}ddp")
        found = both(case, case.split("|")[-1], folder / f"{number}")
        text = difference(wanted[same][0], found[0])
        made[case] = text, (wanted[same][1] + found[1])[-3000:] if text else ""
    return made


def pairwise():
    """Cases in which any two of way, hook, place, loader, option and plan occur together, if they can."""
    ways = ("error", "SIGTERM", "saves", "requeue", "requeue1")
    hooks = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_start")
    hooks += ("on_train_epoch_end", "validation_step", "on_validation_end")
    places = ("0|0", "0|3", "0|5", "1|0", "1|3", "1|5")
    axes = (ways, hooks, places, ("", "workers", "stateful"), OPTIONS, PLANS)
    every = [case for case in product(*axes) if _can_be(*case)]
    random.Random(0).shuffle(every)
    left = {pair for case in every for pair in combinations(case, 2)}
    chosen = []
    while left:
        best = max(every, key=lambda case: len(left.intersection(combinations(case, 2))))
        chosen.append("|".join(best))
        left.difference_update(combinations(best, 2))
    return chosen


def _can_be(way, hook, place, kind, option, name):
    epoch, batch = (int(number) for number in place.split("|"))
    last_batch = 3 if option == "limit" else 5
    if "epoch" in hook:
        return batch == 0 and "requeue" not in way
    if "validation" in hook:
        due = {"without validation": (), "interval": (1, 3, 5), "over epochs": ((3,), (1, 5))[epoch]}
        return batch in due.get(option, (last_batch,)) and (hook == "validation_step" or "requeue" not in way)
    if "requeue" in way and (hook != "on_train_batch_start" or (option == "accumulate" and batch in (3, 5))):
        return False
    is_step = hook != "on_before_optimizer_step" or option != "accumulate" or batch in (3, 5)
    return batch <= last_batch and is_step


WORST = [
    "error|on_before_optimizer_step|0|5||plain|zero3",
    "SIGTERM|on_train_batch_start|1|5|stateful|without validation|auto",
    "requeue|validation_step|0|5||interval|pp2",
]


def check(found):
    assert {case: text for case, (text, _) in found.items() if text} == {}, [said for _, said in found.values()]


def test_the_worst_go_on_as_under_ddp(tmp_path):
    check(apart(outcomes, WORST, tmp_path))


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_any_two_circumstances_go_on_as_under_ddp(tmp_path):
    check(apart(outcomes, pairwise(), tmp_path, seconds=3600))
