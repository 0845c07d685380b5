"""One of two processes is killed while both save: the other one ends, and what has a checkpoint's name is whole."""

import builtins
import os
import re
import shutil

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.faults.worlds import HARM, run_worlds
from benchmarks.uses.session import plain
from lightning_mist import MistStrategy
from lightning_mist.runtime.communication import failure
from lightning_mist.strategy.checkpoints.directory import read_directory
from tests.fits import Project, Tokens, make_trainer, plan
from tests.machine import assume_profile
from tests.strategy.checkpoints.kill_points import Killer
from tests.tiers import asked_for, tiered
from tests.workers import apart

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
    trainer = make_trainer(
        strategy,
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(filename=name, mode=mode, save_top_k=-1, **options) for name, mode in NAMES.items()],
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


def killed(names, folder):
    """What became of worlds, and of fits that go on from what they left, side by side."""
    found = {}
    for what, work in (("killed", fit), ("gone on", go_on)):
        fates = run_worlds(work, names, folder / what, jobs=3)
        found[what] = {name: [list(fate.codes), fate.output] for name, fate in fates.items()}
    return found


ENDED = re.compile("ended without a word|Connection closed by peer|Connection reset by peer")

FILE = ("write:2", "fsync:1", "replace:1", "fsync:2", "replace:2", "fsync:4")
FIRST_OF_TWO = ("mkdir:1", "write:2", "fsync:1", "rename:1", "replace:1", "exchange:1", "unlink:3", "rmdir:1")
"""Of rank 0: makes the folder, writes its part, gives names, and removes what had the name before."""

SECOND_OF_TWO = ("save_checkpoint:1", "write:2", "fsync:1", "fsync:2")

WORLDS = (
    *(f"file:0:{change}" for change in FILE),
    "file:1:save_checkpoint:1",
    *(f"{form}:0:{change}" for form in ("directory", "behind") for change in FIRST_OF_TWO),
    *(f"{form}:1:{change}" for form in ("directory", "behind") for change in SECOND_OF_TWO),
)
FIRST = ("file:0:replace:2", "directory:1:fsync:1")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """A folder, and what became of the worlds in it."""
    folder = tmp_path_factory.mktemp("killed")
    return folder, apart(killed, asked_for(request, "world"), folder, seconds=600)


def content(path):
    """The weights, optimizer state and step of a checkpoint."""
    if path.is_file():
        saved = torch.load(path, weights_only=False)
        states = saved["optimizer_states"]
    else:
        saved = read_directory(path, False)
        states = [state() for state in saved["optimizer_states"]]
    return saved["global_step"], plain([saved["state_dict"], states])


def whole(folder):
    """What all checkpoints hold that have their name, by name."""
    return {name: content(folder / name) for name in os.listdir(folder) if not name.startswith(".partial-")}


@pytest.mark.parametrize("world", tiered(WORLDS, FIRST))
def test_the_other_ends_and_every_checkpoint_is_whole(found, world):
    folder, fates = found
    codes, output = fates["killed"][world]
    killed = int(world.split(":")[1])
    assert codes[killed] == 9, output[-3000:]
    assert codes[1 - killed] not in (None, 0), output[-3000:]
    assert ENDED.search(output), output[-3000:]
    assert "trained to the end" not in output

    before = whole(folder / "killed" / world / SAVED)
    first, second = STEPS, 2 * STEPS
    assert {"last.ckpt", f"step={first}.ckpt"} <= before.keys() <= {"last.ckpt", *(f"step={n}.ckpt" for n in (2, 4))}
    assert before[f"step={first}.ckpt"][0] == first
    assert before["last.ckpt"] in (before[f"step={first}.ckpt"], before.get(f"step={second}.ckpt"))

    codes, output = fates["gone on"][world]
    assert codes == [0, 0], output[-3000:]
    after = whole(folder / "gone on" / world / SAVED)
    assert {name: step for name, (step, _) in after.items()} == {
        "last.ckpt": EPOCHS * STEPS,
        **{f"step={epoch * STEPS}.ckpt": epoch * STEPS for epoch in range(1, EPOCHS + 1)},
    }
    assert after["last.ckpt"] == after[f"step={EPOCHS * STEPS}.ckpt"]
    assert all(after[name] == held for name, held in before.items() if name != "last.ckpt")
