"""LightningCLI and the strategy: its help, its configuration, and values that it does not take."""

import contextlib
import inspect
import io
import re
import sys
from unittest.mock import patch

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

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
        run(*LINE, "--trainer.strategy.help=lightning_mist.MistStrategy")
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
        ("memory_limit=lots", "'lots' is not a size: write a number"),
        ("data_parallel_size=0", "data_parallel_size = 0: at least 1 batch is loaded"),
        ("search.zero_stages=[9]", "ZeRO has stages 0 to 3; give for example"),
        ("blocks=", "leave it out to let blocks be found"),
        ("memroy_limit=1GiB", "'memroy_limit'"),
        ("verbose=maybe", "Got value: maybe"),
        ("timeout=30", 'but got "30"'),
    ],
)
def test_wrong_values_end_before_anything_starts(option, said, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        run(*LINE, STRATEGY, f"--trainer.strategy.{option}")
    assert said in capsys.readouterr().err + str(error.value)
