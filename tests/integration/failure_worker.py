"""Fits that go wrong in the ways that are named.

Run as a script with one name and a folder, Lightning starts the second process; ``python -m`` with a folder and several
names runs worlds of forked processes side by side, and prints what became of them as JSON.
"""

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.faults.worlds import run_worlds
from lightning_mist import MistStrategy
from lightning_mist.runtime.communication import failure
from tests.fits import Project, Tokens, plan
from tests.machine import assume_profile

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
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    failure.GRACE_SECONDS = 3.0
    options = {
        "wrong_world": {"plan": plan([(2, [2]), (1, [1]), (1, [0])], rows=4, microbatches=3)},
        "tight": {"plan": "auto", "memory_limit": "10KiB"},
    }.get(mode, {"plan": PIPELINE})
    profiles = assume_profile(folder / "profiles", 2)
    strategy = MistStrategy(profile_directory=str(profiles), plan_path=str(folder / "plan.json"), **options)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Failing(mode), DataLoader(Tokens(80, 0), batch_size=4))
    print("trained to the end")


def main():
    folder, *modes = sys.argv[1:]
    fates = run_worlds(train, modes, Path(folder), jobs=4)
    print(json.dumps({mode: [fate.codes, fate.output] for mode, fate in fates.items()}))


if __name__ == "__main__":
    if __spec__ is None:
        train(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
