"""Checkpoints that are cut short, lack something or are something else: errors that say so and load nothing."""

import pickle
import shutil
from collections import Counter
from contextlib import nullcontext
from inspect import signature

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_mist import MistStrategy
from lightning_mist.errors import CheckpointError
from lightning_mist.strategy.checkpoints.directory import read_directory
from tests.packed import Packed, packed, table
from tests.strategy.checkpoints.test_directory import META
from tests.strategy.checkpoints.writing import write_directory

SAYS = r"(?s)(has no|could not be read|bytes of the checkpoint|is missing).*\. (Use|Give|Copy|Load|it was|Build)"
SHARDS = ("__0_0.distcp", "__1_0.distcp")


READS_ALL = "weights_only" not in signature(DDPStrategy.load_checkpoint).parameters
"""Before 2.6 Lightning unpickles all of a file, and nobody can ask for less."""


@pytest.mark.skipif(READS_ALL, reason="Lightning asks for it since 2.6")
def test_a_file_with_tensors_of_classes_is_read(tmp_path):
    """Which torch does not where it is told by a function where tensors go, as Lightning tells it."""
    momentum = Packed(*packed(torch.ones(4, 64).double(), table()), table())
    content = {**META, "state_dict": {}, "optimizer_states": [{"state": {0: {"momentum": momentum}}}]}
    torch.save(content, path := tmp_path / "file.ckpt")
    (state,) = MistStrategy().load_checkpoint(path, False)["optimizer_states"]
    found = state["state"][0]["momentum"]
    assert type(found) is Packed
    assert torch.equal(found.codes, momentum.codes)


class Net(LightningModule):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a file and a directory of one checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    state = Net().state_dict()
    names = list(state)
    optimizer = {"state": {name: {"momentum": state[name]} for name in names}, "param_groups": [{"params": names}]}
    torch.save({**META, "state_dict": state, "optimizer_states": [optimizer]}, folder / "file.ckpt")
    halves = [{name: state[name] for name in half} for half in (names[:2], names[2:])]
    write_directory(
        folder / "directory.ckpt", [{"model": halves[0], "optimizer_0": optimizer}, {"model": halves[1]}], META
    )
    return folder


def load(path):
    """What a strategy reads for a module, all of it."""
    strategy, module = MistStrategy(), Net()
    strategy._lightning_module = module
    checkpoint = strategy.load_checkpoint(path)
    strategy.load_model_state_dict(checkpoint)
    for state in checkpoint["optimizer_states"]:
        _ = state if isinstance(state, dict) else state()
    return module


def test_what_is_whole_is_read(whole):
    file, directory = (load(whole / name).state_dict() for name in ("file.ckpt", "directory.ckpt"))
    assert all(torch.equal(file[name], value) for name, value in directory.items())


def test_files_cut_short_anywhere_are_refused(whole, tmp_path):
    content, path = (whole / "file.ckpt").read_bytes(), tmp_path / "cut.ckpt"
    for length in range(0, len(content), len(content) // 100):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=SAYS):
            load(path)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", *SHARDS])
def test_directories_with_a_file_cut_short_or_missing_are_refused(whole, tmp_path, name):
    path = tmp_path / "cut.ckpt"
    shutil.copytree(whole / "directory.ckpt", path)
    content = (path / name).read_bytes()
    for length in range(0, len(content), len(content) // 40 + 1):
        (path / name).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=SAYS):
            load(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=SAYS):
        load(path)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", *SHARDS, "file.ckpt"])
def test_bytes_of_something_else_are_refused_or_harmless(whole, tmp_path, name):
    """Other bytes in the values of a tensor, or in what nothing reads, are no error: nothing says what they were."""
    path, wanted = tmp_path / "bad.ckpt", load(whole / "file.ckpt").state_dict()
    if name == "file.ckpt":
        shutil.copy(whole / name, path)
    else:
        shutil.copytree(whole / "directory.ckpt", path)
    file, seen = path if name == "file.ckpt" else path / name, Counter()
    content = file.read_bytes()
    for start in range(0, len(content), len(content) // 40 + 1):
        file.write_bytes(content[:start] + b"\xff" * 24 + content[start + 24 :])
        try:
            state = load(path).state_dict()
            assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in wanted.items()}
            seen["harmless"] += 1
        except (CheckpointError, pickle.UnpicklingError) as error:
            seen[type(error).__name__] += 1
    assert seen["CheckpointError"] >= 5, seen


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"weight": torch.ones(2)}, [1, 2], torch.ones(3)])
def test_what_is_no_checkpoint_of_lightning_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"has no .*pytorch-lightning_version but .* Load weights alone"):
        load(tmp_path / "other.ckpt")


def test_a_directory_without_weights_is_refused(tmp_path):
    write_directory(tmp_path / "other.ckpt", [{"app": {"weight": torch.ones(2)}}], META)
    with pytest.raises(CheckpointError, match=r"holds \['app'\]: .* holds model. Give one"):
        load(tmp_path / "other.ckpt")


@pytest.mark.parametrize("name", ["file.ckpt", "directory.ckpt"])
def test_another_modules_checkpoint_is_refused(whole, name):
    strategy = MistStrategy()
    for module, word in ((Net(width=7), "size mismatch for layers.0.weight"), (nn.Linear(2, 2), "Missing key")):
        strategy._lightning_module = module
        checkpoint = strategy.load_checkpoint(whole / name)
        with pytest.raises(CheckpointError, match=rf"(?s)not one of this module.*{word}.*strict_loading = False"):
            strategy.load_model_state_dict(checkpoint)
    strategy._lightning_module = module = Net()
    del (checkpoint := strategy.load_checkpoint(whole / name))["state_dict"]["layers.1.bias"]
    strategy.load_model_state_dict(checkpoint, strict=False)


def test_what_is_not_there_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing.ckpt")


def test_what_torch_does_not_unpickle_it_says_itself(whole, tmp_path):
    content = {**META, "state_dict": Net().state_dict(), "hyper_parameters": Counter, "net": Net}
    torch.save({**content, "optimizer_states": []}, tmp_path / "one.ckpt")
    with nullcontext() if READS_ALL else pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(tmp_path / "one.ckpt")
    write_directory(tmp_path / "two.ckpt", [{"model": {}}, {"model": {"weight": torch.ones(1)}}], {**META, "net": Net})
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        read_directory(tmp_path / "two.ckpt", None)
    assert read_directory(tmp_path / "two.ckpt", False)["net"] is Net
