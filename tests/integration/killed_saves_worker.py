"""Fits of two processes of which one is killed while both save.

``python -m`` with a folder and names of worlds runs these, and fits that go on from what they left, side by side; what
became of them is printed as JSON. ``FORM:RANK:CHANGE:NUMBER`` kills a rank before a change of the disk of that kind (in
the middle of a write), counted from the second epoch's checkpoints on; ``FORM:RANK:save_checkpoint:1`` before all of
these.
"""

import builtins
import json
import os
import shutil
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.checkpoints.fits import quiet
from benchmarks.faults.worlds import HARM, run_worlds
from lightning_mist import MistStrategy
from lightning_mist.runtime.communication import failure
from tests.fits import Project, Tokens, plan
from tests.machine import assume_profile
from tests.strategy.checkpoints.kill_points import Killer

FORMS = {
    "file": {},
    "directory": {"save_distributed_checkpoint": True},
    "behind": {"save_distributed_checkpoint": True, "save_asynchronously": True},
}
NAMES = {"{step}": "min", "last": "max"}
"""Of checkpoints, and a mode by which Lightning tells their callbacks apart."""

STEPS, EPOCHS = 2, 3
SAVED = "saved"


class Harm(Killer):
    """Kills before changes of one kind, and notes when."""

    def __init__(self, change, number, folder):
        super().__init__(number)
        self._change, self._folder = change, folder

    def is_time(self):
        if not super().is_time():
            return False
        (self._folder / HARM).touch()
        return True

    def before(self, function):
        return super().before(function) if function.__name__.removeprefix("_") == self._change else function

    def open(self):
        return super().open() if self._change == "write" else builtins.open


def armed(strategy, harm):
    """Let this process be killed when it saves for the second epoch, or later."""
    save, saves = strategy.save_checkpoint, []

    def counted(*args, **kwargs):
        saves.append(args)
        if len(saves) == len(NAMES) + 1:
            harm.__enter__()  # to the end: what is written behind training ends later
        (save if len(saves) <= len(NAMES) else last)(*args, **kwargs)

    last = harm.before(save)
    strategy.save_checkpoint = counted


def fit(name, folder, *, resumes=None):
    """Train, saving after each epoch under a new name and under the same."""
    quiet()
    torch.set_num_threads(1)
    failure.GRACE_SECONDS, failure.TOLD_SECONDS, failure.AGREE_SECONDS = 2.0, 3.0, 2.0
    form, rank, change, number = name.split(":")
    strategy = MistStrategy(
        plan=plan([(2, [1]), (2, [0])], rows=4, microbatches=2),
        profile_directory=str(assume_profile(folder / "profiles", 2)),
        self_check=False,
        **FORMS[form],
    )
    if os.environ["LOCAL_RANK"] == rank and resumes is None:
        armed(strategy, Harm(change, int(number), folder))
    pl.seed_everything(3, verbose=False)
    options = {"dirpath": folder / SAVED, "enable_version_counter": False, "save_on_train_epoch_end": True}
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[ModelCheckpoint(filename=name, mode=mode, save_top_k=-1, **options) for name, mode in NAMES.items()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Project(), DataLoader(Tokens(4 * 2 * STEPS, 0), batch_size=4), ckpt_path=resumes)
    print("trained to the end")


def go_on(name, folder):
    """Train to the end from the last checkpoint of a world, over what its kill has left."""
    before = folder.parents[1] / "killed" / folder.name
    if os.environ["LOCAL_RANK"] == "0":
        shutil.copytree(before / SAVED, folder / SAVED, symlinks=True)
    fit(name, folder, resumes=before / SAVED / "last.ckpt")


def main():
    folder, *names = sys.argv[1:]
    found = {}
    for what, work in (("killed", fit), ("gone on", go_on)):
        fates = run_worlds(work, names, Path(folder) / what, jobs=3)
        found[what] = {name: [fate.codes, fate.output] for name, fate in fates.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
