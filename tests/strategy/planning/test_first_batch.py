"""The first batch is looked at and trained all the same: nothing that comes after is another."""

import itertools
import random
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
        self.seen = on_device(trainer, self, first_batch(trainer, _set_sampler_epoch))
        if self.error is not None:
            raise self.error


def fit(strategy, name, folder, *, ckpt_path=None, save=False, draws=False, **options):
    pl.seed_everything(1, verbose=False)
    module = Module(DATA[name], draws=draws)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 2, **options},
    )
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
