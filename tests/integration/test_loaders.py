"""Fewer data loaders than ranks: what a user sees on every rank is what DDP over as many ranks as loaders shows."""

import os
import re
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist import MistStrategy
from lightning_mist.errors import MistError
from tests import zoo
from tests.fits import make_trainer
from tests.tiers import asked_for
from tests.workers import launched

ROWS, SAMPLES, LAYERS = 4, 34, 4

LAYOUTS = {
    "pipeline": Layout(groups=(Group(), Group()), parts=2),
    "tensor": Layout(groups=(Group(tp=2),)),
    "data": Layout(groups=(Group(dp=2, zero=2),), parts=2),
    "shards": Layout(groups=(Group(dp=2, zero=3, checkpointed=1),)),
    "pipeline and data": Layout(groups=(Group(dp=2), Group(dp=2, zero=1))),
    "pipeline and tensor": Layout(groups=(Group(tp=2), Group(tp=2, sequence=True))),
    "unlike stages": Layout(groups=(Group(dp=2, zero=3), Group(tp=2))),
    "zero bubble": Layout(groups=(Group(), Group()), schedule="zb-h1", parts=2),
}


class Model(pl.LightningModule):
    """A model of the zoo that notes what its user sees."""

    def __init__(self):
        super().__init__()
        self.model, _ = zoo.make("nano_even")
        self.mean, self.sum = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.trained, self.tokens = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = zoo.loss_of(self.model.training_step(batch, batch_idx))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        self.log("rows", torch.tensor(float(len(batch[0]))), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("train_mean", self.trained(loss), on_step=True, on_epoch=True)
        self.tokens.update(batch[0])
        self.log("tokens", self.tokens, on_step=False, on_epoch=True)
        return {"loss": loss, "per row": batch[0].double().mean(dim=1)}

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(("batch", batch_idx, batch[0].tolist()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(("loss", float(outputs["loss"]), outputs["per row"].tolist()))

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(("step", self.trainer.global_step))

    def validation_step(self, batch, batch_idx):
        loss = zoo.loss_of(self.model.training_step(batch, batch_idx))
        self.mean.update(loss)
        self.sum.update(len(batch[0]))
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_most", loss, sync_dist=True, reduce_fx="max")
        self.log("val_mean", self.mean)
        self.log("val_rows", self.sum)

    def on_validation_epoch_end(self):
        losses = [item[1] for item in self.seen if item[0] == "loss"]
        gathered = self.all_gather(torch.tensor(losses[-1:], dtype=torch.float64).sum())
        self.seen.append(("gathered", gathered.reshape(-1).tolist()))

    def on_train_epoch_end(self):
        logged = {name: float(value) for name, value in sorted(self.trainer.callback_metrics.items())}
        self.seen.append(("logged", logged))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Streams(IterableDataset):
    """Samples in their order; rank 1 has others from some sample on."""

    def __init__(self, data, changed_from):
        self.data, self.changed_from = data, changed_from

    def __iter__(self):
        for index in range(len(self.data)):
            is_changed = index >= self.changed_from and os.environ["RANK"] == "1"
            yield self.data[0 if is_changed else index]


def samples():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(zoo.EVEN, (SAMPLES, 9), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def refusals(loaders, folder):
    """By what was asked: the error."""
    pipeline = make_plan(replaced(LAYOUTS["pipeline"], loaders), LAYERS, rows=ROWS)
    own = make_plan(LAYOUTS["pipeline"], LAYERS, rows=ROWS)
    asked = {
        "a loader for each rank": (own, Streams(samples(), SAMPLES), {}),
        "other samples at first": (pipeline, Streams(samples(), 0), {}),
        "other samples later": (pipeline, Streams(samples(), 2 * ROWS), {}),
        "plain": ("auto", samples(), {"overfit_batches": 2}),
        "no divisor": ("auto", samples(), {}),
    }
    found = {}
    for name, (plan, data, options) in asked.items():
        pl.seed_everything(2, verbose=False)
        strategy = MistStrategy(plan=plan, data_parallel_size=3 if name == "no divisor" else loaders)
        trainer = make_trainer(strategy, precision="64-true", max_epochs=1, default_root_dir=folder, **options)
        try:
            trainer.fit(Model(), DataLoader(data, batch_size=ROWS))
        except MistError as error:
            found[name] = f"{type(error).__name__} at step {trainer.global_step}: {error}"
    return found


def fit(strategy, folder):
    """What each rank's user saw, and the parameters at the end."""
    pl.seed_everything(2, verbose=False)
    module, data = Model(), samples()
    saves = pl.callbacks.ModelCheckpoint(
        dirpath=folder, filename="best", monitor="val_loss", enable_version_counter=False
    )
    trainer = make_trainer(
        strategy,
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        num_sanity_val_steps=1,
        callbacks=[saves, pl.callbacks.EarlyStopping("val_loss", patience=5)],
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(data, batch_size=ROWS, shuffle=True), DataLoader(data, batch_size=ROWS))
    state = torch.load(Path(folder) / "best.ckpt", weights_only=False) if trainer.is_global_zero else {"state_dict": {}}
    sums = {name: float(value.double().abs().sum()) for name, value in state["state_dict"].items()}
    return {"seen": module.seen, "saved": sums, "steps": trainer.global_step}


def fits(folder, loaders, names):
    """What a rank sees of them."""
    results = {}
    for name in names:
        own = folder / name.replace(" ", "_")
        if name == "ddp":
            results[name] = fit("ddp", own)
        elif name == "refusals":
            results[name] = refusals(loaders, own)
        else:
            plan = "auto" if name == "auto" else make_plan(replaced(LAYOUTS[name], loaders), LAYERS, rows=ROWS)
            strategy = MistStrategy(plan=plan, data_parallel_size=loaders, profile_directory=str(folder))
            results[name] = fit(strategy, own)
    return results


def replaced(layout, loaders):
    return Layout(**{**{name: getattr(layout, name) for name in layout.__slots__}, "loaders": loaders})


pytestmark = pytest.mark.thorough  # exchanges, gradients and what is reduced have tests of their own in the first tier

CASES = [
    (processes, loaders, name)
    for processes, loaders, names in (
        (2, 1, ("pipeline", "tensor", "data", "shards", "zero bubble", "auto")),
        (4, 1, ("pipeline and data", "unlike stages")),
        (4, 2, ("pipeline and data", "pipeline and tensor", "unlike stages")),
    )
    for name in names
]


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """What every rank saw, by processes, loaders and name; every world is started once, when it is asked for."""
    asked = [(tuple(size), name) for *size, name in asked_for(request, "case")]

    @cache
    def ran(processes, loaders):
        names = [name for size, name in asked if size == (processes, loaders)] if processes > loaders else ["ddp"]
        names += ["refusals"] if processes == 2 > loaders else []
        return launched(fits, tmp_path_factory.mktemp("loaders"), loaders, names, world=processes)

    return lambda processes, loaders, name: [rank[name] for rank in ran(processes, loaders)]


def close(value):
    """Numbers to 1e-10; everything else as it is."""
    if isinstance(value, dict):
        return {key: close(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(close(item) for item in value)
    return pytest.approx(value, rel=1e-10, abs=1e-12) if isinstance(value, float) else value


@pytest.mark.parametrize("case", CASES)
def test_every_rank_sees_what_the_rank_of_its_loader_sees_under_ddp(seen, case):
    processes, loaders, _ = case
    wanted, ranks = seen(loaders, loaders, "ddp"), seen(*case)
    for rank, found in enumerate(ranks):
        own = wanted[rank * loaders // processes]
        assert found["steps"] == own["steps"]
        assert found["seen"] == close(own["seen"])
    assert ranks[0]["saved"] == close(wanted[0]["saved"])


@pytest.mark.parametrize("case", CASES[:1])
def test_what_is_reduced_counts_every_loader_once(seen, case):
    logged = [values for kind, *values in seen(*case)[0]["seen"] if kind == "logged"]
    assert [(item["rows"], item["val_rows"]) for (item,) in logged] == [(SAMPLES, SAMPLES)] * 2


@pytest.mark.parametrize("case", CASES[:1])
def test_what_fewer_loaders_cannot_do_is_refused_on_every_rank(seen, case):
    expected = {
        "a loader for each rank": "at step 0: the plan is for batches of 2 data loaders, but there are 1",
        "other samples at first": "at step 0: .*rank 1 has loaded other samples than rank 0",
        "other samples later": "at step 2: .*rank 1 has loaded other samples than rank 0",
        "plain": r"only plain data parallelism could train here \(overfit_batches=2\)",
        "no divisor": "data_parallel_size = 3 on 2 processes: .* it must divide 2",
    }
    for found in seen(*case[:2], "refusals"):
        assert list(found) == list(expected)
        for name, text in found.items():
            assert re.search(expected[name], text), text
