"""The first batch is looked at and trained all the same: nothing that comes after is another."""

import contextlib
import itertools
import random
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.strategy.planning import first_batch as first_batch_module
from lightning_mist.strategy.planning.first_batch import first_batch, load_the_same, on_device
from tests.fits import make_trainer


class Stream(IterableDataset):
    """Twelve rows at a time of one generator that goes on."""

    def __init__(self):
        self.generator = (torch.full((2,), float(i)) for i in range(1000))

    def __iter__(self):
        return itertools.islice(self.generator, 12)


class Remembers(IterableDataset):
    at = 0

    def __iter__(self):
        for _ in range(12):
            self.at += 1
            yield torch.full((2,), float(self.at))


class Rows(Dataset):
    """Rows by number, with numbers drawn by ``draw``."""

    def __init__(self, draw=lambda: ()):
        self.draw = draw

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([float(index), *self.draw()])


class OwnRandom(Rows):
    def __init__(self):
        rng = np.random.default_rng(3)
        super().__init__(lambda: (rng.random(),))


class GlobalRandom(Rows):
    def __init__(self):
        super().__init__(lambda: (random.random(), float(torch.rand(())), np.random.rand()))


class Stateful(DataLoader):
    """Goes on where it was saved."""

    start = 0

    def __iter__(self):
        for batch in itertools.islice(super().__iter__(), self.start, None):
            self.start += 1
            yield batch
        self.start = 0

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


class GivenState(Stateful):
    """Its next iterator goes on where it was saved, and only that one."""

    given = 0

    def __iter__(self):
        self.start, self.given = self.given, 0
        for batch in itertools.islice(DataLoader.__iter__(self), self.start, None):
            self.start += 1
            yield batch

    def load_state_dict(self, state):
        self.given = state["start"]


DATA = {
    "stream over one generator": lambda: DataLoader(Stream(), batch_size=4),
    "dataset that remembers": lambda: DataLoader(Remembers(), batch_size=4),
    "own generator": lambda: DataLoader(OwnRandom(), batch_size=4),
    "global generators, shuffled": lambda: DataLoader(GlobalRandom(), batch_size=4, shuffle=True),
    "two loaders": lambda: CombinedLoader(
        {"a": DataLoader(Rows(), batch_size=4, shuffle=True), "b": DataLoader(OwnRandom(), batch_size=2)}, "min_size"
    ),
    "a list": lambda: [torch.full((2,), float(i)) for i in range(6)],
    "sampler with an epoch": lambda: DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), 2, 0)),
    "a loader with a state": lambda: Stateful(Rows(), batch_size=4),
    "workers": lambda: DataLoader(GlobalRandom(), batch_size=4, shuffle=True, num_workers=1),
}


DATA_WITH_EPOCHS = {
    "sampler of one rank": lambda: DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), 1, 0)),
    "a loader that is given its state": lambda: GivenState(Rows(), 4, sampler=DistributedSampler(Rows(), 1, 0)),
    "own generator beside an epoch": lambda: CombinedLoader(
        {"a": DATA_WITH_EPOCHS["sampler of one rank"](), "b": DataLoader(OwnRandom(), batch_size=4)}, "min_size"
    ),
}


class Module(pl.LightningModule):
    """Keeps what it is given and what follows in the global generator."""

    def __init__(self, make, *, draws=False):
        super().__init__()
        self.weight, self.make, self.draws = torch.nn.Parameter(torch.zeros(())), make, draws
        self.seen, self.asked = [], 0

    def train_dataloader(self):
        self.asked += 1
        return self.make()

    def on_train_start(self):
        if self.draws:
            torch.rand(3)

    def training_step(self, batch, batch_idx):
        leaves = torch.utils._pytree.tree_leaves(batch)
        self.seen.append(torch.cat([*(leaf.flatten() for leaf in leaves), torch.rand(1)]).tolist())
        return self.weight * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Looking(SingleDeviceStrategy):
    """Looks at a batch during setup, as planning does."""

    def __init__(self, error=None):
        super().__init__(device="cpu")
        self.error, self.seen = error, None

    def setup(self, trainer):
        super().setup(trainer)
        trainer._checkpoint_connector.restore_loops()
        self.seen = on_device(trainer, self, first_batch(trainer, _set_sampler_epoch))
        if self.error is not None:
            raise self.error


class Validated(Module):
    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append([self.current_epoch, self.global_step, batch_idx])

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.weight * 1.0)

    def val_dataloader(self):
        return DataLoader(torch.zeros(2, 2))


def fit(strategy, name, folder, *, ckpt_path=None, save=False, draws=False, kind=Module, fails=False, **options):
    pl.seed_everything(1, verbose=False)
    module = kind((DATA | DATA_WITH_EPOCHS)[name], draws=draws)
    trainer = make_trainer(strategy, devices=1, default_root_dir=folder, **{"max_epochs": 2, **options})
    with pytest.raises(RuntimeError, match="a bad sample") if fails else contextlib.nullcontext():
        trainer.fit(module, ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(folder / "saved.ckpt")
    return module


@pytest.mark.parametrize("name", DATA)
def test_training_sees_the_batches_it_would_have_seen(name, tmp_path):
    looking = Looking()
    found, wanted = fit(looking, name, tmp_path), fit(SingleDeviceStrategy(device="cpu"), name, tmp_path)
    assert found.seen == wanted.seen
    assert len(found.seen) > 0
    assert found.asked == wanted.asked == 1
    leaves = torch.utils._pytree.tree_leaves(looking.seen)
    assert torch.cat([leaf.flatten() for leaf in leaves]).tolist() == found.seen[0][:-1]


class Interrupts(pl.Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.at:
            trainer.save_checkpoint(trainer.default_root_dir + "/saved.ckpt")


@pytest.mark.parametrize(
    ("name", "within"),
    [
        (name, within)
        for name in DATA
        for within in (None, 1, 2)
        if name != "workers" and (name, within) != ("a list", 2)  # it has two batches
    ],
)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_training_goes_on_from_a_checkpoint_as_it_would_have(name, within, tmp_path):
    more = {"save": True} if within is None else {"callbacks": [Interrupts(within)]}
    fit(SingleDeviceStrategy(device="cpu"), name, tmp_path, max_epochs=1, **more)
    found, wanted = (
        fit(strategy, name, tmp_path, ckpt_path=tmp_path / "saved.ckpt", max_epochs=3)
        for strategy in (Looking(), SingleDeviceStrategy(device="cpu"))
    )
    assert found.seen == wanted.seen
    assert len(found.seen) > 0 or name == "a loader with a state"


class Fails(pl.Callback):
    """Fails, or only saves, once: in a hook of an epoch and batch."""

    def __init__(self, hook, epoch, batch, path, fails):
        self.place, self.path, self.fails, self.has_come = (epoch, batch), path, fails, False
        setattr(self, hook, self.come)

    def come(self, trainer, *rest):
        loop = trainer.fit_loop
        here = loop.epoch_progress.current.ready - 1, loop.epoch_loop.batch_progress.current.ready - 1
        if here != self.place or self.has_come or trainer.sanity_checking:
            return
        self.has_come = True
        if self.fails:
            raise RuntimeError("a bad sample")
        trainer.save_checkpoint(self.path)

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("name", "hook", "epoch", "batch", "fails", "times", "options"),
    [
        ("sampler of one rank", "on_train_batch_start", 0, 5, True, 1, {}),
        ("sampler of one rank", "on_before_optimizer_step", 1, 5, False, 2, {"limit_val_batches": 0}),
        ("sampler of one rank", "on_before_optimizer_step", 0, 2, True, 1, {}),
        ("sampler of one rank", "on_train_batch_end", 1, 5, True, 1, {"accumulate_grad_batches": 4}),
        ("sampler of one rank", "on_before_optimizer_step", 1, 2, False, 2, {"reload_dataloaders_every_n_epochs": 1}),
        ("sampler of one rank", "on_validation_end", 0, 1, True, 1, {"limit_train_batches": 2}),
        (
            "own generator beside an epoch",
            "on_before_optimizer_step",
            0,
            5,
            False,
            1,
            {"max_epochs": -1, "max_steps": 14},
        ),
        ("own generator", "on_validation_end", 1, 5, False, 1, {"val_check_interval": 2}),
        ("own generator", "on_train_epoch_start", 1, 5, True, 2, {}),
        ("stream over one generator", "on_validation_start", 1, 2, True, 1, {}),
        ("a loader with a state", "on_validation_batch_start", 0, 5, False, 1, {"val_check_interval": 2}),
        ("a loader that is given its state", "on_train_batch_start", 0, 5, False, 1, {}),
        ("a loader that is given its state", "on_train_batch_end", 0, 5, True, 1, {"check_val_every_n_epoch": 2}),
        (
            "a loader that is given its state",
            "on_train_batch_end",
            1,
            2,
            False,
            1,
            {"reload_dataloaders_every_n_epochs": 1},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_training_goes_on_from_wherever_it_ended(name, hook, epoch, batch, fails, times, options, tmp_path):
    """By Lightning's rules, which ask whether the batch was processed; more than once, too."""
    plainly, given = partial(SingleDeviceStrategy, device="cpu"), {"kind": Validated, "max_epochs": 3, **options}
    path = None
    for number in range(times):
        ends = Fails(hook, epoch, batch, tmp_path / f"{number}.ckpt", fails)
        fit(plainly(), name, tmp_path, callbacks=[ends], ckpt_path=path, fails=fails, **given)
        path = ends.path
    found, wanted = (fit(make(), name, tmp_path, ckpt_path=path, **given) for make in (Looking, plainly))
    assert found.seen == wanted.seen
    assert len(found.seen) > 0
    assert found.asked == wanted.asked


def test_what_is_saved_before_the_first_batch_is_fetched_does_not_know_of_it(tmp_path):
    states = []
    for make in (Looking, partial(SingleDeviceStrategy, device="cpu")):
        saves = Fails("on_train_start", -1, -1, tmp_path / "saved.ckpt", False)
        fit(make(), "a loader that is given its state", tmp_path, callbacks=[saves])
        states.append(torch.load(saves.path, weights_only=False)["loops"]["fit_loop"])
    assert states[0] == states[1]
    assert states[0]["state_dict"]["combined_loader"] == [{"start": 0}]


@pytest.mark.parametrize("name", ["stream over one generator", "own generator", "a list"])
def test_it_may_be_the_only_batch(name, tmp_path):
    found, wanted = (
        fit(strategy, name, tmp_path, limit_train_batches=1)
        for strategy in (Looking(), SingleDeviceStrategy(device="cpu"))
    )
    assert found.seen == wanted.seen
    assert len(found.seen) == 2


def test_what_hooks_draw_before_the_first_batch_is_what_they_would_have_drawn(tmp_path):
    """The batches are those of a sampler whose numbers were drawn before; what hooks draw is not moved by it."""
    found = fit(Looking(), "sampler with an epoch", tmp_path, draws=True)
    assert found.seen == fit(SingleDeviceStrategy(device="cpu"), "sampler with an epoch", tmp_path, draws=True).seen


def test_an_error_of_planning_arrives_as_it_was_raised(tmp_path):
    with pytest.raises(PlanError, match="no plan") as caught:
        fit(Looking(PlanError("no plan")), "a list", tmp_path)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("member", [(item for item in ()), torch.ones(2, requires_grad=True) * 2.0])
def test_what_cannot_be_copied_is_refused_as_what_can_be_trained_plainly(member):
    with pytest.raises(TraceError, match=r"^the first batch cannot be copied \(\w+: .*give batches without generators"):
        on_device(
            None,
            SimpleNamespace(precision_plugin=SimpleNamespace(convert_input=iter)),
            {"x": torch.ones(2), "z": member},
        )


def test_no_training_batch_is_refused(tmp_path):
    with pytest.raises(TraceError, match="limit_train_batches=0"):
        fit(Looking(), "a list", tmp_path, limit_train_batches=0)


@pytest.mark.parametrize(
    ("digests", "same"), [(["a", "a"], True), (["a", "b"], False), (["a"], False), ([None] * 2, False)]
)
def test_batches_are_the_same_everywhere_if_ranks_can_tell(monkeypatch, digests, same):
    monkeypatch.setattr(first_batch_module, "of_all_ranks", lambda digest: digests)
    assert load_the_same(torch.zeros(2), len(digests)) is same


@pytest.mark.parametrize(("digests", "same"), [("aabb", False), ("aaaa", True)])
def test_ranks_that_share_a_loader_count_once(monkeypatch, digests, same):
    monkeypatch.setattr(first_batch_module, "of_all_ranks", lambda digest: list(digests))
    assert load_the_same(torch.zeros(2), 2) is same


def test_ranks_that_share_a_loader_and_load_other_samples_are_refused(monkeypatch):
    monkeypatch.setattr(first_batch_module, "of_all_ranks", lambda digest: list("aabc"))
    with pytest.raises(PlanError, match="rank 3 has loaded other samples than rank 2"):
        load_the_same(torch.zeros(2), 2)
