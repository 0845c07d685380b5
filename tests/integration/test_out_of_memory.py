"""Memory that runs out in the first steps: the next plan trains the same, a few times at most."""

import os
import random
from itertools import product
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import InfeasibleError, MistStrategy, SearchSpace
from lightning_mist.strategy.memory_retry import MOST_PLANS
from tests.fits import make_trainer
from tests.machine import assume_profile
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice on loggers, workers and small datasets

WIDTH, ROWS, LAYERS, BATCHES = 64, 16, 3, 8


class Net(pl.LightningModule):
    """Draws, counts in a buffer, logs, and runs out of memory behind its layers in batches that it is told."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.register_buffer("seen", torch.zeros(()))
        self.losses, self.calls = [], []

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch[0] + 0.1 * torch.randn_like(batch[0]))
        self.seen += 1.0
        self.log("loss", hidden.mean(), on_step=True, on_epoch=True)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if not getattr(self.trainer.strategy, "is_planning", False) and has_to_fail(batch_idx):
            random.random()
            raise torch.OutOfMemoryError("CUDA out of memory, says the test")
        return self.head(hidden).pow(2).mean()

    def on_train_batch_start(self, batch, batch_idx):
        self.calls.append(f"start {batch_idx}")

    def on_before_zero_grad(self, optimizer):
        self.calls.append("zero")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(f"end {batch_idx}")
        self.losses.append((float(outputs["loss"]), float(self.seen), random.random()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


FAILS = "MIST_TEST_FAILS"
"""Environment variable: a folder with a file for every time that memory runs out, which begin with their batch."""


def has_to_fail(batch_idx):
    """Whether memory runs out now. Files, since everything that a step can reach is put back."""
    file = next(Path(os.environ[FAILS]).glob(f"{batch_idx}-*"), None)
    if file is None:
        return False
    file.unlink()
    return True


LIMIT = 230_000
"""Bytes in which a step does not fit without offloading."""


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_process_group():
    """Lightning leaves its process group to the process; other tests make their own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    (tmp_path / "fails").mkdir()
    monkeypatch.setenv(FAILS, str(tmp_path / "fails"))
    return str(assume_profile(tmp_path / "profiles", 1))


def train(strategy, fails=(), module=None, **options):
    pl.seed_everything(1, verbose=False)
    for number, batch in enumerate(fails):
        (Path(os.environ[FAILS]) / f"{batch}-{number}").touch()
    module = (module or Net)()
    rows = torch.randn(BATCHES * ROWS, 6, generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(strategy, devices=1, max_epochs=1, **options)
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=ROWS))
    return trainer, module


def told(trainer, module):
    """What a run shows."""
    values = [parameter.detach().clone() for parameter in module.parameters()]
    return module.losses, module.calls, {name: float(value) for name, value in trainer.callback_metrics.items()}, values


def assert_same(one, other):
    assert one[:3] == other[:3]
    for left, right in zip(one[3], other[3], strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("is_accumulating", "batch"), tiered(product([False, True], [0, 1]), [(False, 0), (True, 1)]))
def test_the_next_plan_trains_the_same_batch(profiles, tmp_path, capsys, batch, is_accumulating):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1} if is_accumulating else {}
    expected = told(*train("ddp", **options))
    strategy = MistStrategy(profile_directory=profiles, offload_directory=str(tmp_path / "state"))
    trainer, module = train(strategy, [batch], **options)
    assert not trainer.strategy.plan.is_plain
    assert_same(told(trainer, module), expected)
    # Twice: the plain plan that was tried first is predicted only now.
    assert capsys.readouterr().err.count("out of memory: planning again, within ") == 2


@pytest.mark.parametrize("batch", tiered([0, 1], [1]))
def test_a_plan_that_offloads_gives_way_with_its_step_taken(profiles, tmp_path, batch):
    """Its optimizer's step may still be on its way through the layers when memory runs out behind them."""
    expected = told(*train("ddp"))
    asked = {"profile_directory": profiles, "offload_directory": str(tmp_path / "state"), "memory_limit": LIMIT}
    first, module = train(MistStrategy(**asked))
    assert_same(told(first, module), expected)
    trainer, module = train(MistStrategy(**asked), [batch])
    assert_same(told(trainer, module), expected)
    before, after = (item.strategy.plan for item in (first, trainer))
    assert before.stages[0].offload.any
    assert after.stages != before.stages
    peaks = [plan.predicted.stages[0].peak_bytes for plan in (before, after)]
    assert peaks[1] < peaks[0]
    # What did not fit is not tried again.
    again, _ = train(MistStrategy(**asked))
    assert again.strategy.plan.stages == after.stages


def test_it_ends_when_no_plan_helps(profiles, tmp_path, capsys):
    asked = {"profile_directory": profiles, "offload_directory": str(tmp_path / "state")}
    with pytest.raises(InfeasibleError, match=r"out of memory.* memory_limit"):
        train(MistStrategy(**asked), [0] * 10)
    assert 1 <= capsys.readouterr().err.count("out of memory: planning again, within ") <= 2 * (MOST_PLANS + 1)


class FailsBehind(Net):
    """Runs out of memory in its backward."""

    def backward(self, loss):
        if has_to_fail(f"behind {self.trainer.global_step}"):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 1 byte")
        super().backward(loss)


def test_what_hooks_have_seen_ends_with_what_to_ask_for(profiles):
    search = SearchSpace(checkpointed_shares=(0.0,))
    with pytest.raises(InfeasibleError, match=r"rank 0 ran out of memory in its .* with memory_limit=\d+"):
        train(MistStrategy(profile_directory=profiles, search=search), ["behind 0"], module=FailsBehind)
    # Behind the first steps an error is the user's.
    with pytest.raises(RuntimeError, match="enforce fail"):
        train(MistStrategy(profile_directory=profiles, search=search), ["behind 3"], module=FailsBehind)


class Broken(Net):
    def on_before_zero_grad(self, optimizer):
        raise ValueError("mine")


def test_other_errors_are_the_users(profiles):
    with pytest.raises(ValueError, match=r"^mine$"):
        train(MistStrategy(profile_directory=profiles), module=Broken)
