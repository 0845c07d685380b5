"""Whatever goes wrong on one rank soon ends all of them, with its traceback; bad input is refused on every rank."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.faults.sweep import main as run_sweep
from benchmarks.faults.worlds import run_worlds
from lightning_mist.runtime.communication import failure
from tests.fits import Project, Tokens, make_trainer, mist, plan, quiet
from tests.machine import assume_profile
from tests.tiers import asked_for, tiered
from tests.workers import apart

PIPELINE = plan([(2, [1]), (2, [0])], rows=4, microbatches=2)


class Failing(Project):
    """Goes wrong in the sixth batch, on the rank that the mode names."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def training_step(self, batch, batch_idx):
        mode, _, rank = self.mode.partition(":")
        if self.trainer.global_step == 5 and str(self.trainer.strategy.local_rank) == rank:
            if mode == "raise":
                raise RuntimeError(f"broken on rank {rank}")
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        mode, _, rank = self.mode.partition(":")
        if mode == "stuck" and self.trainer.global_step == 5:
            if str(self.trainer.strategy.local_rank) == rank:
                raise RuntimeError(f"broken on rank {rank}")
            torch.futures.Future().wait()  # as a collective whose backend does not notice that a peer has gone

    def loss(self, batch):
        mode, _, rank = self.mode.partition(":")
        is_time = self.trainer.global_step == 3
        skipped, order = set(), list(range(len(self.blocks)))
        if mode == "skip_on" and is_time and str(self.trainer.strategy.local_rank) == rank:
            skipped = {3}
        if mode == "swap" and is_time:
            order = [0, 2, 1, 3]
        if mode == "branch" and str(self.trainer.strategy.local_rank) == rank:
            order = [1, 0, 2, 3]
        hidden = self.embed(batch["x"])
        for index in order:
            if index not in skipped:
                hidden = self.blocks[index](hidden)
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()), logits


def train(mode, folder):
    # Whoever starts the tests in the background of a script starts them deaf to interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failure.GRACE_SECONDS = 3.0
    options = {
        "wrong_world": {"plan": plan([(2, [2]), (1, [1]), (1, [0])], rows=4, microbatches=3)},
        "tight": {"plan": "auto", "memory_limit": "10KiB"},
    }.get(mode, {"plan": PIPELINE})
    assume_profile(folder / "profiles", 2)
    strategy = mist(folder, **options)
    trainer = make_trainer(strategy, max_epochs=3, default_root_dir=folder)
    trainer.fit(Failing(mode), DataLoader(Tokens(80, 0), batch_size=4))
    print("trained to the end")


def run_modes(modes, folder):
    """How worlds of forked processes, side by side, ended."""
    fates = run_worlds(train, modes, folder, jobs=4)
    return {mode: [fate.codes, fate.output] for mode, fate in fates.items()}


ROOT = Path(__file__).parents[2]

RUNNING = {
    "raise:1": "RuntimeError: broken on rank 1",
    "kill:1": "rank 1: its process has ended without a word|Connection closed by peer",
    "interrupt:0": "KeyboardInterrupt",
    # Rank 1 waits for ever where no backend wakes it: its watcher ends it.
    "stuck:0": "RuntimeError: broken on rank 0",
    # Control flow that changes between steps.
    "swap": "layer 2 .blocks.2. was called after layer 0: blocks must run in the order of the trace",
    "skip_on:0": r"returned after layer 2 without calling layer 3 \(blocks.3\)",
}
REFUSED = {
    "wrong_world": r"PlanError: the plan is for 3 devices, but 2 processes run",
    "tight": r"InfeasibleError: .*10.0 KiB",
    # Control flow that differs between ranks.
    "branch:1": r"PlanError: ranks \[1\] see another module than rank 0",
}
FAULTS = (
    "first batch/leave/plain",
    "map/error/zero1",
    "checks/exit/zero3",
    "groups/kill/pp2",
    "engine/leave/zero3",
    "first forward/term/plain",
    "after backward/error/pp2",
    "backward/memory/zero1",
    "save/term/pp2",
    "gather optimizer/interrupt/tp2",
    "teardown/kill/pp2",
    "batch end/all-error/pp2",
    "forward/all-term/zero3",
)
"""Harm at a point of a fit, of a kind, under a plan; what callbacks save on exceptions is tried in all."""

SAVED = ("batch end/all-error/pp2", "forward/all-term/zero3")
"""All ranks fail alike, so that they can still gather a checkpoint."""

FIRST = (
    "raise:1",
    "stuck:0",
    "wrong_world",
    "branch:1",
    "groups/kill/pp2",
    "first forward/term/plain",
    "batch end/all-error/pp2",
)


def start(*command):
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def finish(process, seconds):
    try:
        # Every rank that Lightning started holds the pipe, so this ends when the last of them has ended.
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"still running after {seconds} s: {output[-3000:]}")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What became of all worlds: of those of this folder, and of those of the program that sweeps over all faults."""
    folder = tmp_path_factory.mktemp("failures")
    faults = folder / "faults.json"
    swept = ("--hasty", "--jobs", "7", "--out", str(faults), *asked_for(request, "name"))
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(apart, run_sweep, swept, seconds=400)
        modes = apart(run_modes, asked_for(request, "mode"), folder / "modes", seconds=400)
        sweep.result()
    return modes, {cell["cell"]: cell for cell in json.loads(faults.read_text())}


@pytest.mark.parametrize("mode", tiered(RUNNING, FIRST))
def test_one_failing_rank_ends_all(found, mode):
    codes, output = found[0][mode]
    assert None not in codes
    assert any(codes)
    assert "trained to the end" not in output
    assert re.search(RUNNING[mode], output), output[-3000:]


@pytest.mark.parametrize("mode", tiered(REFUSED, FIRST))
def test_bad_input_is_refused_before_training(found, mode):
    codes, output = found[0][mode]
    assert None not in codes
    assert any(codes)
    assert re.search(REFUSED[mode], output), output[-3000:]


@pytest.mark.parametrize("name", tiered(FAULTS, FIRST))
def test_harm_to_one_rank_ends_all(found, name):
    cell = found[1][name]
    assert cell["verdict"] == "ends", f"{cell['verdict']}: {cell['output'][-3000:]}"
    assert cell["saved"] or name not in SAVED


@pytest.mark.thorough
def test_a_failing_rank_ends_all_that_lightning_has_started(tmp_path):
    process = start(__file__, "raise:1", tmp_path)
    output = finish(process, 200)
    assert process.returncode != 0
    assert "RuntimeError: broken on rank 1" in output


if __name__ == "__main__":  # Lightning starts the second process
    quiet()
    train(sys.argv[1], Path(sys.argv[2]))
