"""Checkpoints of fits: directories while training goes on and after it, what becomes of them, and what is refused."""

import os
import pickle
from concurrent.futures import Future
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

from lightning_mist import MistStrategy
from lightning_mist.errors import CheckpointError
from lightning_mist.strategy.checkpoints.directory import DirectoryWriter, read_directory
from tests import packed
from tests.fits import make_trainer
from tests.strategy.checkpoints.test_directory import assert_same
from tests.strategy.test_strategy import Net, loader, one_stage, train
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice on loggers, workers and small datasets


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_process_group():
    """Lightning leaves its process group to the process; other tests make their own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def strategy_of(folder, plan, **options):
    return MistStrategy(plan=plan, profile_directory=str(folder / "profiles"), self_check=False, **options)


def fit(folder, plan=None, *, callbacks=None, **options):
    """A fit that keeps the last checkpoint and the best of two epochs; Lightning removes what is worse."""
    if callbacks is None:
        callbacks = [ModelCheckpoint(folder, "{epoch}", monitor="epoch", mode="max", save_last=True)]
    return train(folder, strategy_of(folder, plan or one_stage(), **options), callbacks=callbacks)


def content(path):
    found = read_directory(path, True)
    return {
        "model": dict(found["state_dict"]),
        "optimizers": [state() for state in found["optimizer_states"]],
        "step": found["global_step"],
    }


def test_what_is_written_while_training_goes_on_is_what_is_written_at_once(tmp_path):
    for kind in ("at once", "meanwhile"):
        trainer, _ = fit(tmp_path / kind, save_distributed_checkpoint=True, save_asynchronously=kind == "meanwhile")
        assert trainer.strategy._pending is None
        assert trainer.strategy._writers is None
        assert {name for name in os.listdir(tmp_path / kind) if name != "profiles"} == {"last.ckpt", "epoch=1.ckpt"}
    for name in ("last.ckpt", "epoch=1.ckpt"):
        assert_same(content(tmp_path / "meanwhile" / name), content(tmp_path / "at once" / name))


def test_what_is_replaced_stays_until_the_new_one_is_there(tmp_path):
    strategy = MistStrategy(save_distributed_checkpoint=True)
    (tmp_path / "old.ckpt").mkdir()
    strategy._pending = writing, _ = Future(), tmp_path / "new.ckpt"
    strategy.remove_checkpoint(str(tmp_path / "old.ckpt"))
    assert os.listdir(tmp_path) == ["old.ckpt"]
    writing.set_result(None)
    strategy.finish_saving()
    assert os.listdir(tmp_path) == []


def test_values_are_those_of_the_moment_of_saving(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            if trainer.global_step == 2:
                self.weights = {name: value.clone() for name, value in module.state_dict().items()}
                trainer.save_checkpoint(tmp_path / "two.ckpt")
                assert trainer.strategy._pending is not None

    saves = Save()
    fit(tmp_path, callbacks=[saves], save_distributed_checkpoint=True, save_asynchronously=True)
    assert_same(content(tmp_path / "two.ckpt")["model"], saves.weights)


@pytest.mark.parametrize("is_meanwhile", [True, False])
def test_what_cannot_be_written_is_an_error_of_the_fit(tmp_path, monkeypatch, is_meanwhile):
    def fail(self, metadata, results):
        raise OSError("no space left on device")

    monkeypatch.setattr(DirectoryWriter, "finish", fail)
    with pytest.raises(
        CheckpointError, match=r"was not written: rank 0: OSError: no space left on device\. Every rank"
    ):
        fit(tmp_path, save_distributed_checkpoint=True, save_asynchronously=is_meanwhile)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".ckpt")] == []


@pytest.mark.parametrize("microbatches", tiered([1, 2], [2]))
def test_one_file_made_of_a_directory_is_resumed_by_anybody(tmp_path, microbatches):
    plan = one_stage(microbatches=microbatches)
    trainer, module = fit(tmp_path, plan, callbacks=[], save_distributed_checkpoint=True)
    trainer.save_checkpoint(tmp_path / "end.ckpt")  # the engine is gone: the optimizer's state is kept for that
    torch.save(_format_checkpoint(_load_distributed_checkpoint(tmp_path / "end.ckpt")), tmp_path / "file.ckpt")
    assert_same(dict(Net.load_from_checkpoint(tmp_path / "file.ckpt").state_dict()), dict(module.state_dict()))
    ends = []
    for strategy, path in (
        (pl.strategies.DDPStrategy(), "file.ckpt"),
        (strategy_of(tmp_path, plan), "file.ckpt"),
        (strategy_of(tmp_path, plan), "end.ckpt"),
    ):
        again = make_trainer(strategy, devices=1, max_epochs=3, default_root_dir=tmp_path)
        other = Net()
        again.fit(other, loader(), loader(), ckpt_path=tmp_path / path)
        assert again.global_step == 18
        ends.append(dict(other.state_dict()))
    assert_same(ends[1], ends[2])
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-6)


def test_state_of_a_class_is_resumed_from_directories_and_what_is_made_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "BLOCK", 6)
    monkeypatch.setattr(packed, "LEAST", 36)
    strategy = strategy_of(tmp_path, one_stage(), save_distributed_checkpoint=True)
    keeps = ModelCheckpoint(tmp_path, "during")
    trainer, _ = train(tmp_path, strategy, Net(optimizer=packed.InAClass), [keeps])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    (optimizer,) = trainer.optimizers
    assert any(type(state["momentum"]) is packed.Packed for state in optimizer.state.values())
    torch.save(_format_checkpoint(_load_distributed_checkpoint(tmp_path / "end.ckpt")), tmp_path / "file.ckpt")
    optimizer.param_groups[0]["lr"] = 0.25
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    (later,) = read_directory(tmp_path / "later.ckpt", False)["optimizer_states"]
    assert later()["param_groups"][0]["lr"] == 0.25
    ends = []
    for plan, path in ((one_stage(), "during.ckpt"), (one_stage(), "file.ckpt"), ("auto", "end.ckpt")):
        again = make_trainer(strategy_of(tmp_path, plan), devices=1, max_epochs=3, default_root_dir=tmp_path)
        other = Net(optimizer=packed.InAClass)
        again.fit(other, loader(), loader(), ckpt_path=tmp_path / path)
        ends.append(dict(other.state_dict()))
    assert_same(ends[1:], [ends[0]] * 2)


def test_a_directory_can_be_tested_from(tmp_path):
    trainer, _ = fit(tmp_path, save_distributed_checkpoint=True)
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert best.is_dir()
    trainer.test(Net(), loader(), ckpt_path="best", verbose=False)
    assert_same(dict(trainer.lightning_module.state_dict()), content(best)["model"])


def test_a_module_without_values_takes_those_of_a_directory(tmp_path):
    class Configured(Net):
        def __init__(self):
            pl.LightningModule.__init__(self)
            self.optimizer_class = torch.optim.Adam

        def configure_model(self):
            if not hasattr(self, "blocks"):
                with self.trainer.init_module(empty_init=True):
                    inner = Net()
                self.blocks, self.head = inner.blocks, inner.head

    plan, ends = one_stage(microbatches=2), []
    trainer, _ = fit(tmp_path, plan, callbacks=[], save_distributed_checkpoint=True)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for module in (Net(), Configured()):
        again = make_trainer(strategy_of(tmp_path, plan), devices=1, max_epochs=3, default_root_dir=tmp_path)
        again.fit(module, loader(), ckpt_path=tmp_path / "end.ckpt")
        ends.append(dict(module.state_dict()))
    assert_same(*ends)


def test_what_directories_cannot_do_is_refused(tmp_path):
    trainer, _ = fit(tmp_path, callbacks=[], save_distributed_checkpoint=True)
    with pytest.raises(TypeError, match=r"storage_options=1 with save_distributed_checkpoint=True.*leave them out"):
        trainer.save_checkpoint(tmp_path / "one.ckpt", storage_options=1)
    with pytest.raises(
        ValueError, match=r"s3://bucket/one.ckpt with save_distributed_checkpoint=True.*give such a path"
    ):
        trainer.save_checkpoint("s3://bucket/one.ckpt")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "notes").touch()
    with pytest.raises(CheckpointError, match=r"IsADirectoryError: .* is a folder and no checkpoint"):
        trainer.save_checkpoint(tmp_path / "results")
    assert os.listdir(tmp_path / "results") == ["notes"]
    assert pickle.loads(pickle.dumps(trainer.strategy))._pending is None


def test_users_plugins_write_and_remove_files_as_before(tmp_path):
    seen = []

    class Plugin(pl.plugins.io.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            seen.append(("save", os.path.basename(path), storage_options))
            super().save_checkpoint(checkpoint, path)

        def remove_checkpoint(self, path):
            seen.append(("remove", os.path.basename(path)))

    trainer, _ = fit(tmp_path, callbacks=[], checkpoint_io=Plugin())
    trainer.save_checkpoint(tmp_path / "one.ckpt", storage_options={"a": 1})
    trainer.strategy.remove_checkpoint(tmp_path / "one.ckpt")
    assert seen == [("save", "one.ckpt", {"a": 1}), ("remove", "one.ckpt")]


def test_lightning_before_2_6_loads(tmp_path, monkeypatch):
    """Its strategies do not know ``weights_only``, and its trainer does not give it."""
    ddp = next(kind for kind in MistStrategy.__mro__ if kind.__name__ == "Strategy")
    monkeypatch.setattr(ddp, "load_checkpoint", lambda self, path: self.checkpoint_io.load_checkpoint(path))
    path = tmp_path / "saved.ckpt"
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.4.0"}, path)
    assert MistStrategy().load_checkpoint(path)["state_dict"] == {}


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_for_a_module_without_values_tensors_stay_in_a_file_that_allows_it(tmp_path, monkeypatch, is_new, is_empty):
    path, asked, load = tmp_path / "a.ckpt", [], torch.load
    content = {"state_dict": {"weight": torch.arange(4.0)}, "pytorch-lightning_version": "2.6.0"}
    torch.save(content, path, _use_new_zipfile_serialization=is_new)
    strategy = MistStrategy()
    strategy._lightning_module = torch.nn.Linear(4, 4, device="meta" if is_empty else "cpu")
    monkeypatch.setattr(torch, "load", lambda *args, **more: asked.append(more.get("mmap")) or load(*args, **more))
    assert torch.equal(strategy.load_checkpoint(path)["state_dict"]["weight"], torch.arange(4.0))
    assert asked == [True if is_new and is_empty else None]
