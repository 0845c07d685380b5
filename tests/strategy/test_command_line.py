"""LightningCLI and the strategy: its help, its configuration, and values that it does not take."""

import contextlib
import inspect
import io
import re
import sys
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

STRATEGY = "--trainer.strategy=lightning_mist.MistStrategy"
NAMES = [name for name in inspect.signature(MistStrategy.__init__).parameters if name not in ("self", "kwargs")]
GIVEN = {
    "memory_limit": "22GiB",
    "search.zero_stages": "[1, 3]",
    "search.max_stages": "2",
    "timeout": "0:10:00",
    "verbose": "true",
    "bucket_cap_mb": "5",
    "check_reduction": "true",
}


LINE = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--seed_everything=false")


def run(*arguments):
    with patch.object(sys, "argv", ["train.py", *arguments]):
        return LightningCLI(BoringModel, run=False, save_config_callback=None)


@pytest.fixture(scope="module")
def described():
    """What help says of each argument."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        run(*LINE, "--trainer.strategy.help=mist")
    parts = re.split(r"^  --trainer\.strategy\.", text.getvalue(), flags=re.MULTILINE)[1:]
    return {part.split()[0]: " ".join(part.split()) for part in parts}


@pytest.mark.parametrize("name", NAMES)
def test_help_says_of_every_argument_what_it_means_and_what_it_is_by_default(described, name):
    said = described[name]
    meaning = re.search(r"(?:\s|\})([A-Z`][^()]{10,})", said.split(" ", 1)[1])
    assert meaning, said
    assert "default: " in said


def test_a_printed_configuration_gives_the_same_strategy(tmp_path, capsys):
    options = [f"--trainer.strategy.{name}={value}" for name, value in GIVEN.items()]
    with pytest.raises(SystemExit):
        run(*LINE, STRATEGY, *options, "--print_config")
    printed = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(printed)
    first = run(*LINE, STRATEGY, *options).trainer.strategy
    second = run(f"--config={tmp_path / 'config.yaml'}").trainer.strategy
    assert yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]["memory_limit"] == "22GiB"
    assert first._request == second._request
    assert first._request.search.zero_stages == (1, 3)
    assert first._ddp_kwargs == second._ddp_kwargs
    assert first._timeout == second._timeout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("memory_limit=lots", "memory_limit = 'lots': 'lots' is not a size: write a number and one of B, KiB, MiB, "),
        ("data_parallel_size=0", "data_parallel_size = 0: at least 1 batch is loaded; give 1 or more, or None"),
        ("search.zero_stages=[9]", "zero_stages=(9,): ZeRO has stages 0 to 3; give for example (0, 1, 2, 3)"),
        ("search.zero_stage=[1]", "zero_stage: search has no such option; did you mean zero_stages?"),
        ("search.class_path=lightning_mist.SearchSpace|search.max_stage=1", "max_stage: search has no such option; "),
        ("blocks=", "blocks = '': the qualified name of a module is needed; leave it out to let blocks be found"),
        ("memroy_limit=1GiB", "memroy_limit: the strategy has no such option; did you mean memory_limit?"),
        ("verbose=maybe", "verbose = maybe: Expected a bool"),
        ("timeout=30", 'timeout = 30: Not of type timedelta: Expected a string with form "h:m:s" or '),
    ],
)
def test_wrong_values_end_with_one_sentence_before_anything_starts(option, said, capsys):
    with pytest.raises(SystemExit) as ended:
        run(*LINE, "--trainer.strategy=mist", *(f"--trainer.strategy.{part}" for part in option.split("|")))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: trainer.strategy: {said}")
    assert printed.out + printed.err[:-1] == printed.err.splitlines()[0]


def test_one_rank_says_what_is_wrong(capsys):
    with patch.object(rank_zero_only, "rank", 1), pytest.raises(SystemExit) as ended:
        run(*LINE, "--trainer.strategy=mist", "--trainer.strategy.memroy_limit=1GiB")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("others", ["strategy.timeout=30", "strategy.memory_limit=1GiB", "max_epochz=1"])
def test_what_is_wrong_with_others_is_said_as_ever(others, capsys):
    with pytest.raises(SystemExit):
        run(*LINE, "--trainer.strategy=DDPStrategy", f"--trainer.{others}")
    assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize("name", ["mist", "MistStrategy", "lightning_mist.MistStrategy"])
def test_the_strategy_is_found_by_its_names(name, tmp_path):
    config = tmp_path / "config.yaml"
    options = {"memory_limit": "3GiB"}
    config.write_text(yaml.safe_dump({"trainer": {"strategy": {"class_path": name, "init_args": options}}}))
    for given in ([f"--config={config}"], [f"--trainer.strategy={name}", "--trainer.strategy.memory_limit=3GiB"]):
        found = run(*LINE, *given).trainer.strategy
        assert (type(found), found._request.memory_limit) == (MistStrategy, 3 * 2**30)


# A project in the manner of Lightning's own template for command lines: everything is in its configuration -----------

PROJECT = """
seed_everything: 3
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  strategy: ddp
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
  callbacks:
  - {class_path: LearningRateMonitor}
  - class_path: ModelCheckpoint
    init_args: {monitor: val_loss, save_last: true, filename: "best-{epoch}-{val_loss:.2f}"}
model: {width: 12, depth: 3}
data: {rows: 32, batch_size: 8}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1}}
"""


class Points(pl.LightningDataModule):
    def __init__(self, rows: int = 64, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(
            TensorDataset(torch.linspace(-1, 1, self.hparams.rows)[:, None]), self.hparams.batch_size, shuffle=True
        )

    val_dataloader = train_dataloader


class Fitted(pl.LightningModule):
    def __init__(self, width: int = 4, depth: int = 1):
        super().__init__()
        self.save_hyperparameters()
        self.first, self.last = nn.Linear(1, width), nn.Linear(width, 1)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        loss = (self.last(self.blocks(self.first(batch[0]))) - batch[0].sin()).square().mean()
        self.log("train_loss" if self.training else "val_loss", loss, on_epoch=True)
        return loss

    validation_step = training_step


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loggers, workers and small data sets
def test_a_project_trains_as_ever_with_one_word_changed(tmp_path, monkeypatch):
    found = {}
    for word in ("ddp", "mist"):
        (tmp_path / word).mkdir()
        monkeypatch.chdir(tmp_path / word)
        Path("config.yaml").write_text(PROJECT.replace("strategy: ddp", f"strategy: {word}"))
        with patch.object(sys, "argv", ["main.py", "fit", "--config=config.yaml"]):
            LightningCLI(Fitted, Points)
        dist.destroy_process_group()
        made = sorted(str(path.relative_to(".")) for path in Path("logs").rglob("*") if path.is_file())
        values = next(Path("logs").rglob("metrics.csv")).read_text()
        saved = next(Path("logs").rglob("config.yaml")).read_text().replace(f"strategy: {word}", "")
        found[word] = (made, values, saved)
    assert len(found["ddp"][0]) == 5
    assert found["mist"] == found["ddp"]
