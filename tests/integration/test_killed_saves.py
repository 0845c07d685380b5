"""One of two processes is killed while both save: the other one ends, and what has a checkpoint's name is whole."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.uses.session import plain
from lightning_mist.strategy.checkpoints.directory import read_directory
from tests.integration.killed_saves_worker import EPOCHS, SAVED, STEPS
from tests.ranks import environment
from tests.tiers import asked_for, tiered

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
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.killed_saves_worker", folder, *asked_for(request, "world")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def content(path):
    """The weights, optimizer state and step of a checkpoint."""
    if path.is_file():
        saved = torch.load(path, weights_only=False)
        states = saved["optimizer_states"]
    else:
        saved = read_directory(path, False)
        states = [state.read() for state in saved["optimizer_states"]]
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
