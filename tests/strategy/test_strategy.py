"""One process: what a plan without stages does to an ordinary project, and what is refused or left to DDP."""

import builtins
import copy
import io
import json
import pickle
import shutil
import sys
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import InfeasibleError, MistStrategy, PlanError, SearchSpace
from lightning_mist.plan import Predicted, PredictedStage, save
from tests.fits import make_trainer
from tests.machine import assume_profile
from tests.plans import plan_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice on loggers, workers and small datasets

ROWS, LAYERS = 4, 3


class Net(pl.LightningModule):
    def __init__(self, norm=False, automatic=True, optimizer=torch.optim.Adam):
        super().__init__()
        self.automatic_optimization = automatic
        self.optimizer_class = optimizer
        middle = nn.BatchNorm1d if norm else nn.LayerNorm
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), middle(6), nn.Tanh()) for _ in range(LAYERS)])
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.blocks(x))

    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch[0]).mean())

    def test_step(self, batch, batch_idx):
        self.log("test", self(batch[0]).mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return self.optimizer_class(self.parameters(), lr=0.05)


class NoBlocks(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Linear(6, 6)


def loader(rows=6 * ROWS):
    values = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(values), batch_size=ROWS)


def one_stage(*, microbatches=1, checkpointed=0, layers=LAYERS, rows=ROWS):
    return plan_of(rows, microbatches, {"layers": layers, "checkpointed": checkpointed})


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_process_group():
    """Lightning leaves its process group to the process; other tests make their own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return str(assume_profile(tmp_path_factory.mktemp("profiles"), 1))


def train(folder, strategy, module=None, callbacks=(), epochs=2, **options):
    pl.seed_everything(1, verbose=False)
    module = module or Net()
    trainer = make_trainer(
        strategy, devices=1, max_epochs=epochs, callbacks=list(callbacks), default_root_dir=folder, **options
    )
    trainer.fit(module, loader(), loader())
    return trainer, module


def values(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_equal(left, right):
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(left, right, strict=True))


SEARCHED = SearchSpace(zero_stages=(0,))
"""What is asked of the planner where it is to search whatever there is to gain."""


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (one_stage(), {}),
        (one_stage(microbatches=2), {}),
        (one_stage(microbatches=4, checkpointed=2), {"gradient_clip_val": 0.1}),
        (one_stage(checkpointed=3), {"accumulate_grad_batches": 2}),
    ],
)
def test_plans_of_one_device_train_as_under_ddp(tmp_path, plan, options):
    _, expected = train(tmp_path, "ddp", **options)
    trainer, module = train(tmp_path, MistStrategy(plan=plan), **options)
    assert_equal(values(module), values(expected))
    assert trainer.strategy.plan == plan
    if trainer.global_step > 2:
        assert trainer.strategy.report.timed_steps == trainer.global_step - 2


class LogsAnywhere(Net):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.log("batch", 1.0)
        return batch


@pytest.mark.parametrize("plan", ["auto", one_stage()])
def test_what_lightning_does_not_let_hooks_log_is_refused(tmp_path, profiles, plan):
    with pytest.raises(MisconfigurationException, match=r"You can't `self.log\(\)`"):
        train(tmp_path, MistStrategy(plan=plan, profile_directory=profiles), LogsAnywhere())


def test_an_automatic_plan_is_written_with_what_it_was_made_for(tmp_path, profiles):
    path, report = tmp_path / "a" / "plan.json", tmp_path / "b" / "report.json"
    strategy = MistStrategy(search=SEARCHED, profile_directory=profiles, plan_path=str(path), report_path=str(report))
    trainer, module = train(tmp_path, strategy)
    assert_equal(values(module), values(train(tmp_path, "ddp")[1]))
    data = json.loads(path.read_text())
    assert data["fingerprint"]["num_layers"] == str(LAYERS)
    assert trainer.strategy.plan.predicted.step_seconds > 0
    assert json.loads(report.read_text())["timed_steps"] == 10
    # The file is a plan like any other.
    again, module = train(tmp_path, MistStrategy(plan=str(path)))
    assert again.strategy.plan == trainer.strategy.plan
    assert_equal(values(module), values(train(tmp_path, "ddp")[1]))


@pytest.mark.thorough
def test_corrections_are_kept_and_used_unless_that_is_turned_off(tmp_path, profiles):
    folder = tmp_path / "profiles"
    shutil.copytree(profiles, folder)
    shutil.rmtree(folder / "plans", ignore_errors=True)
    for path in folder.glob("corrections-*"):
        path.unlink()
    found = {}
    for wanted in (True, False):
        strategy = MistStrategy(
            search=SEARCHED,
            profile_directory=str(folder),
            plan_path=str(tmp_path / "plan.json"),
            correct_profile=wanted,
        )
        trainer, _ = train(tmp_path, strategy)
        found[wanted] = trainer.strategy._decision.basis
        (kept,) = folder.glob("corrections-*")
        if wanted:
            written = kept.read_text()
            assert {item.term for item in trainer.strategy.report.corrections} >= {"forward", "backward", "update"}
        else:
            assert kept.read_text() == written
            assert trainer.strategy.report.corrections == ()
    assert found[True].store.path == kept
    assert found[False].store is None
    assert found[False].corrections == ()


def test_a_limit_that_nothing_satisfies_says_what_binds(tmp_path, profiles):
    with pytest.raises(InfeasibleError, match=r"no plan fits.*Largest terms"):
        train(tmp_path, MistStrategy(memory_limit="1KiB", profile_directory=profiles))


@pytest.mark.sample
@pytest.mark.parametrize(
    ("module", "callbacks", "reason"),
    [
        (lambda: Net(automatic=False), list, "automatic_optimization=False"),
        (lambda: Net(norm=True), list, "of a BatchNorm1d"),
        (NoBlocks, list, "repeated blocks"),
        (Net, lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], "StochasticWeightAveraging"),
    ],
)
def test_what_cannot_be_cut_trains_whole_and_the_reason_is_said(tmp_path, profiles, capsys, module, callbacks, reason):
    _, expected = train(tmp_path, "ddp", module=_seeded(module), callbacks=callbacks())
    capsys.readouterr()
    strategy = MistStrategy(
        search=SEARCHED, verbose=True, profile_directory=profiles, plan_path=str(tmp_path / "plan.json")
    )
    trainer, trained = train(tmp_path, strategy, module=_seeded(module), callbacks=callbacks())
    assert trainer.strategy.plan.num_stages == 1
    assert reason in capsys.readouterr().err
    assert_equal(values(trained), values(expected))


def _seeded(make):
    torch.manual_seed(5)
    return make()


@pytest.mark.parametrize(
    ("plan", "module", "message"),
    [
        (one_stage(layers=5), Net, "spreads 5 layers, but the module has 3"),
        (one_stage(rows=8), Net, "global_batch_size 8, but 1 ranks load batches of 4 rows"),
        (one_stage(microbatches=2), lambda: Net(norm=True), "of a BatchNorm1d"),
        (one_stage(microbatches=2), lambda: Net(automatic=False), "automatic_optimization=False"),
        (one_stage(checkpointed=1), lambda: Net(optimizer=torch.optim.LBFGS), "LBFGS"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path, plan, module, message):
    with pytest.raises(PlanError, match=message):
        train(tmp_path, MistStrategy(plan=plan), module=module())


def test_a_plan_file_that_is_none_is_refused_before_anything_is_tried(tmp_path):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise AssertionError("tried")

    (tmp_path / "plan.json").write_text("{stages: 2}")
    with pytest.raises(PlanError, match=r"plan\.json.*JSON"):
        train(tmp_path, MistStrategy(plan=str(tmp_path / "plan.json")), module=Fails())


def test_a_limit_that_cannot_be_checked_is_said(tmp_path, capsys):
    train(tmp_path, MistStrategy(memory_limit="1KiB"), module=Net(automatic=False), epochs=1)
    assert "memory_limit of 1.0 KiB is not checked" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_given_plan_without_prediction_is_estimated_under_a_limit(tmp_path, capsys):
    trainer, _ = train(tmp_path, MistStrategy(plan=one_stage(), memory_limit="1GiB"), epochs=1)
    assert "Fits in 1.0 GiB per device: stage 0 of 1 needs" in capsys.readouterr().err
    assert trainer.strategy.estimate.source == "traced"
    with pytest.raises(InfeasibleError, match=r"(?s)Does not fit in 1.0 KiB per device: .*Raise memory_limit, or let"):
        train(tmp_path, MistStrategy(plan=one_stage(), memory_limit="1KiB"), epochs=1)


def test_a_given_plan_that_predicts_more_than_the_limit_is_refused(tmp_path):
    plan = one_stage()
    stage = PredictedStage(
        steady_seconds=1.0, boundary_seconds=0.0, forward_seconds=0.5, backward_seconds=0.5, peak_bytes=4096
    )
    predicted = replace(plan, predicted=Predicted(step_seconds=1.0, stages=(stage,)))
    train(tmp_path, MistStrategy(plan=predicted, memory_limit=4096), epochs=1)
    with pytest.raises(InfeasibleError, match=r"does not fit in 4.0 KiB per device: stage 0 of 1 needs 4.0 KiB"):
        train(tmp_path, MistStrategy(plan=predicted, memory_limit=4095), epochs=1)


def test_arguments_that_mean_nothing_yet_are_refused():
    with pytest.raises(ValueError, match="save_asynchronously=True with save_distributed_checkpoint=False"):
        MistStrategy(save_asynchronously=True)
    with pytest.raises(ValueError, match="'lots' is not a size"):
        MistStrategy(memory_limit="lots")


def test_a_plan_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"missing\.json"):
        train(tmp_path, MistStrategy(plan=str(tmp_path / "missing.json")), epochs=1)


def test_a_cluster_of_another_size_is_refused(tmp_path, profiles):
    with pytest.raises(ValueError, match="has 8 devices, but 1 processes run"):
        train(tmp_path, MistStrategy(cluster="1x8xL4", profile_directory=profiles))
    with pytest.raises(ValueError, match="has 2 devices, but 1 processes run"):
        train(tmp_path, MistStrategy(cluster="L4+T4", profile_directory=profiles))


class Watched(Net):
    def training_step(self, batch, batch_idx):
        note_step()  # noqa: F821  a name of nobody's: what the step may change is looked at
        return super().training_step(batch, batch_idx)


def test_few_frames_of_ours_stand_above_the_step_and_no_two_of_one_name(tmp_path, monkeypatch):
    frames = []

    def note():
        frame, found = sys._getframe(2), []
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("lightning_mist."):
                found.append(frame.f_code.co_name)
            frame = frame.f_back
        frames.append(found)

    monkeypatch.setattr(builtins, "note_step", note, raising=False)
    train(tmp_path, MistStrategy(plan=one_stage(microbatches=2, checkpointed=1)), Watched())
    for found in frames[-4:]:
        assert found[0] == "run_part"
        assert 10 < len(found) <= 17
        assert len(set(found)) == len(found)


def test_fit_test_predict_and_fit_again(tmp_path):
    save(one_stage(microbatches=2), tmp_path / "plan.json")
    trainer, module = train(tmp_path, MistStrategy(plan=str(tmp_path / "plan.json")), epochs=1)
    assert "test" in trainer.test(module, loader(), verbose=False)[0]
    assert "val" in trainer.validate(module, loader(), verbose=False)[0]
    assert len(trainer.predict(module, loader())) == 6
    before = values(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    assert any(not torch.equal(a, b) for a, b in zip(before, values(module), strict=True))


def test_a_module_that_no_device_holds_is_not_evaluated_whole(tmp_path):
    trainer = make_trainer(MistStrategy(memory_limit=64), devices=1, default_root_dir=tmp_path)
    with pytest.raises(InfeasibleError, match=r"memory_limit is 64 B .*there is no plan.*MistStrategy\(plan=\.\.\.\)"):
        trainer.test(Net(), loader(), verbose=False)


LIGHTNINGS = {"_trainer", "_fabric", "_hparams", "forward"}
"""Attributes of modules that Lightning sets in a fit."""


class Copies(pl.Callback):
    """Copies and saves what hooks are given, in every place of training."""

    def __init__(self):
        self.copies = []

    def on_train_start(self, trainer, pl_module):
        self.keep(trainer, pl_module)

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if trainer.global_step == 0:
            self.copies.append(pickle.loads(pickle.dumps(trainer.precision_plugin)))

    def on_train_epoch_end(self, trainer, pl_module):
        self.keep(trainer, pl_module)
        assert trainer.model.module is pl_module or trainer.model is pl_module

    def keep(self, trainer, pl_module):
        whole = io.BytesIO()
        torch.save(pl_module, whole)
        assert b"lightning_mist." not in whole.getvalue()
        self.copies += [copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))]
        for item in (trainer.strategy, trainer.optimizers, trainer):
            pickle.loads(pickle.dumps(item))
            copy.deepcopy(item)


@pytest.mark.parametrize("plan", ["auto", one_stage(microbatches=2), one_stage(checkpointed=1)])
def test_what_hooks_copy_and_save_is_the_users_own(tmp_path, plan, profiles):
    seen = Copies()
    before = {name: set(vars(part)) for name, part in Net().named_modules()}
    strategy = MistStrategy(plan=plan, profile_directory=profiles)
    _, module = train(tmp_path, strategy, callbacks=[seen], epochs=1)
    assert len(seen.copies) == 5
    for copied in seen.copies:
        if isinstance(copied, nn.Module):
            for name, part in copied.named_modules():
                assert set(vars(part)) - LIGHTNINGS == before[name] - LIGHTNINGS
                assert not part._forward_pre_hooks
        else:
            assert type(copied) is pl.plugins.Precision
    assert_equal(values(module), values(train(tmp_path, "ddp", epochs=1)[1]))


@pytest.mark.parametrize("plan", [one_stage(), one_stage(microbatches=2)], ids=["plain", "engine"])
def test_trainers_can_be_pickled_after_a_fit_as_under_ddp(tmp_path, plan):
    trainer, module = train(tmp_path, MistStrategy(plan=plan), epochs=1)
    copied = pickle.loads(pickle.dumps(trainer))
    assert copied.strategy.plan == plan
    assert copied.callback_metrics == trainer.callback_metrics
    assert_equal(values(copied.lightning_module), values(module))


def test_checkpoints_go_both_ways(tmp_path):
    plan = one_stage(microbatches=2, checkpointed=1)
    saved = ModelCheckpoint(tmp_path / "mist", save_last=True)
    train(tmp_path, MistStrategy(plan=plan), callbacks=[saved], epochs=1)
    _, straight = train(tmp_path, "ddp", epochs=2)
    for strategy in ("ddp", MistStrategy(plan=plan)):
        pl.seed_everything(1, verbose=False)
        module = Net()
        trainer = make_trainer(strategy, devices=1, max_epochs=2, default_root_dir=tmp_path)
        trainer.fit(module, loader(), loader(), ckpt_path=saved.last_model_path)
        assert_equal(values(module), values(straight))
    loaded = Net.load_from_checkpoint(saved.last_model_path, map_location="cpu")
    assert len(values(loaded)) == len(values(straight))


def test_parts_of_batches_draw_new_masks_in_every_step(tmp_path):
    class Noisy(Net):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)

        def training_step(self, batch, batch_idx):
            masks = self.dropout(torch.ones(len(batch[0]), 32))
            return {"loss": super().training_step(batch, batch_idx), "masks": masks}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            drawn.extend(tuple(row.tolist()) for row in outputs["masks"])

    drawn = []
    train(tmp_path, MistStrategy(plan=one_stage(microbatches=2)), module=Noisy(), callbacks=[Look()], epochs=2)
    assert len(set(drawn)) == len(drawn) > 12


def test_batches_whose_step_draws_by_itself_are_not_cut(tmp_path):
    class Noisy(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0] + torch.rand_like(batch[0]),), batch_idx)

    with pytest.raises(PlanError, match="cuts the batch of a process of 4 rows"):
        train(tmp_path, MistStrategy(plan=one_stage(microbatches=2)), module=Noisy())


def test_what_a_step_returns_beside_the_loss_is_of_the_whole_batch(tmp_path):
    class Extras(Net):
        def training_step(self, batch, batch_idx):
            rows = batch[0].sum(1)
            return {"loss": self(batch[0]).mean(), "mean": rows.mean(), "inner": {"rows": rows}}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            rows = batch[0].sum(1)
            assert torch.equal(outputs["inner"]["rows"], rows)
            assert float(outputs["mean"]) == pytest.approx(float(rows.mean()), abs=1e-6)
            seen.append(batch_idx)

    seen = []
    train(tmp_path, MistStrategy(plan=one_stage(microbatches=2)), module=Extras(), callbacks=[Look()], epochs=1)
    assert len(seen) == 6


def test_a_dictionary_without_a_loss_is_refused_as_lightning_does(tmp_path):
    class Forgets(Net):
        def training_step(self, batch, batch_idx):
            loss = self(batch[0]).mean()
            return {"loss": loss} if batch_idx == 0 else {"los": loss}

    with pytest.raises(MisconfigurationException, match="'loss' key needs to be present"):
        train(tmp_path, MistStrategy(plan=one_stage(microbatches=2)), module=Forgets())


@pytest.mark.parametrize(("optimizer", "is_excluded"), [(torch.optim.AdamW, False), (torch.optim.Adafactor, True)])
def test_an_optimizer_of_whole_parameters_rules_out_tensor_parallelism(tmp_path, optimizer, is_excluded):
    trainer, _ = train(tmp_path, MistStrategy(plan=one_stage(microbatches=2)), module=Net(optimizer=optimizer))
    reasons = trainer.strategy._decision.module_map.excludes("tensor")
    assert any("Adafactor needs whole parameters" in reason for reason in reasons) == is_excluded


class ClipsByValue(Net):
    def __init__(self):
        super().__init__(automatic=False)

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self(batch[0]).pow(2).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        optimizer.step()


def test_manual_steps_clip_by_value(tmp_path):
    plan, module = one_stage(checkpointed=1), ClipsByValue()
    twin = copy.deepcopy(module)
    train(tmp_path, MistStrategy(plan=plan), module, epochs=1)
    train(tmp_path, "ddp", twin, epochs=1)
    assert_equal(values(module), values(twin))
