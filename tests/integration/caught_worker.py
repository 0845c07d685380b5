"""Fits whose errors a program catches and goes on from, and fits whose ranks come apart.

``python -m`` with a folder and names ``case/plan`` runs worlds of forked processes side by side, and prints as JSON how
they ended and what each rank saw.
"""

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.faults.worlds import HARM, run_worlds
from lightning_mist import MistStrategy
from lightning_mist.strategy.training.engine import Engine
from tests.machine import assume_profile
from tests.traps.project import LAYERS, PLANS, Block, Project, Rows, loader


class Pruned(Exception):
    """As Optuna's, with something in it."""

    def __init__(self, trial, why):
        super().__init__(trial, why)
        self.trial = trial


def rank():
    return int(os.environ["LOCAL_RANK"])


class Fails(Project):
    """Raises in the fourth batch, on all ranks."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("DefaultCPUAllocator: not enough")
        return super().training_step(batch, batch_idx)


class FailsOn(Callback):
    """Raises before the fourth batch on some ranks; others are slow there."""

    def __init__(self, *ranks, seconds=0.0):
        self.ranks, self.seconds = ranks, seconds

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3 and rank() in self.ranks:
            raise RuntimeError("DefaultCPUAllocator: not enough")
        if batch_idx == 3:
            time.sleep(self.seconds)


class Prunes(Callback):
    """Raises behind the validation of some ranks."""

    def __init__(self, *ranks):
        self.ranks = ranks

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking and rank() in self.ranks:
            raise Pruned(7, "too slow")


class FailsInSetup(Callback):
    def setup(self, trainer, module, stage):
        if rank() == 1:
            raise Pruned(7, "no data")


class Late(Project):
    """Gets its blocks when its strategy asks for them, without values under one that gives these later."""

    def __init__(self):
        super().__init__()
        del self.blocks
        self.float()

    def configure_model(self):
        if not hasattr(self, "blocks"):
            with self.trainer.init_module(empty_init=True):
                self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)


def uneven(rows):
    """As many rows of four for this rank as are given, without a sampler that evens them out."""
    return DataLoader(Rows(rows), batch_size=4)


class Watch:
    """What a logger of rank 0 does with ``watch``: hooks on modules of that rank only."""

    def __init__(self, which, reads="outputs", everywhere=False):
        self.which, self.reads, self.everywhere, self.seen = which, reads, everywhere, []

    def __call__(self, module):
        if rank() == 0 or self.everywhere:
            for part in self.which(module):
                part.register_forward_hook(self.look)

    def look(self, part, given, output):
        if self.reads == "parameters":
            self.seen += [float(parameter.detach().norm()) for parameter in part.parameters()]
        else:
            self.seen.append(0.0 if output is None else float(output.detach().norm()))


def trainer_of(plan, folder, callbacks=(), **options):
    profiles = assume_profile(folder / "profiles", 2)
    options_of_mist = {"profile_directory": str(profiles), "plan_path": str(folder / "plan.json")}
    is_ddp = plan == "ddp"
    strategy = "ddp_find_unused_parameters_true" if is_ddp else MistStrategy(plan=PLANS[plan], **options_of_mist)
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **({"max_epochs": 1} | options),
    )


TRIALS = {
    "all": [(Fails,)],
    "first": [(Project, FailsOn(0))],
    "last": [(Project, FailsOn(1))],
    "pruned": [(Project, Prunes(0, 1))],
    "pruned on one": [(Project, Prunes(0))],
    "again": [(Project, FailsOn(1)), (Project, FailsOn(0))],
    "setup": [(Project, FailsInSetup())],
    "slow": [(Project, FailsOn(1, seconds=13.0))],
    "same": [(Project, FailsOn(0, 1))],
    "same on one": [(Project, FailsOn(1))],
    "none": [],
}
"""Fits that fail before the one that trains."""


WATCHED = {
    "blocks": Watch(lambda module: module.blocks, "parameters"),
    "outputs": Watch(lambda module: module.blocks),
    "embed": Watch(lambda module: [module.embed], "parameters"),
    "parts": Watch(lambda module: [block.up for block in module.blocks]),
    "every": Watch(lambda module: module.modules()),
    "whole": Watch(lambda module: [module], everywhere=True),
}


def uneven_ends(plan, folder):
    """The data of the first rank end early; what ends the other, where DDP has a broken connection."""
    (folder / HARM).touch()
    trainer = trainer_of(plan, folder, use_distributed_sampler=False, num_sanity_val_steps=0)
    trainer.fit(Project(), uneven((16, 32)[rank()]))
    return {"steps": trainer.global_step}


def tested_afterwards(plan, folder):
    module, trainer = Late(), trainer_of(plan, folder)
    trainer.fit(module, loader())
    (folder / HARM).touch()
    return {"tested": trainer.test(module, loader(16, seed=1), verbose=False)}


def left_in_teardown(plan, folder):
    """The second rank fails in the next fit while the first is still in the teardown of the one before."""
    release = Engine.release_optimizers

    def late(engine, timeout):
        time.sleep(3 * (rank() == 0))
        return release(engine, timeout)

    Engine.release_optimizers = late
    trainer_of(plan, folder).fit(Project(), loader())
    (folder / HARM).touch()
    trainer_of(plan, folder, [FailsInSetup()]).fit(Project(), loader())
    return {}


OTHERS = {"uneven": uneven_ends, "tested": tested_afterwards, "teardown": left_in_teardown}


def run(name, folder):
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case, plan = name.split("/")
    if case in OTHERS:
        pl.seed_everything(3, verbose=False)
        (folder / f"rank{rank()}.json").write_text(json.dumps(OTHERS[case](plan, folder)))
        return
    seen = {"errors": []}
    for trial in TRIALS.get(case, []):
        pl.seed_everything(1, verbose=False)
        kind, *callbacks = trial
        module = kind()
        started = time.monotonic()
        try:
            trainer_of(plan, folder, callbacks).fit(module, loader(), loader(16, seed=1))
        except (RuntimeError, Pruned) as error:
            seconds = time.monotonic() - started
            seen["errors"].append([type(error).__name__, str(error), getattr(error, "trial", None), seconds])
    pl.seed_everything(3, verbose=False)
    module = module if "same" in case else Project()
    (folder / HARM).touch()
    trainer = trainer_of(plan, folder)
    watch = WATCHED.get(case, lambda module: None)
    watch(module)
    trainer.fit(module, loader(), loader(16, seed=1))
    seen["steps"] = trainer.global_step
    seen["weights"] = [value for weight in module.state_dict().values() for value in weight.flatten().tolist()]
    seen["looks"] = getattr(watch, "seen", [])
    (folder / f"rank{rank()}.json").write_text(json.dumps(seen))


def main():
    folder, *names = Path(sys.argv[1]), *sys.argv[2:]
    found = {}
    for name, fate in run_worlds(run, names, folder, jobs=2, seconds=90).items():
        files = [folder / name.replace("/", "_") / f"rank{number}.json" for number in range(2)]
        seen = [json.loads(file.read_text()) if file.exists() else None for file in files]
        found[name] = {"codes": fate.codes, "seconds": fate.seconds, "output": fate.output, "seen": seen}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
