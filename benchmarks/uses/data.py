"""Data of every kind."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from benchmarks.uses.session import Session, Uses
from tests.traps.project import ROWS, Project, Rows, loader

uses = Uses("data")

Pair = namedtuple("Pair", ["x", "y"])


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows that come from one generator, one after the other; each rank has its own."""

    def __init__(self, seed: int, count: int = 24) -> None:
        self.generator, self.count = torch.Generator().manual_seed(seed), count

    def __iter__(self) -> Any:
        rows = Rows(8)
        for _ in range(self.count):
            yield rows[int(torch.randint(0, 8, (), generator=self.generator))]


class Augmented(Rows):
    """Rows that are changed at random when they are read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return row | {"x": row["x"].roll(int(torch.randint(0, 6, ())))}


def trained(name: str, make: Any, *, val: Any = None, **options: Any) -> None:
    """One use of other training data."""
    uses(name)(lambda session: session.fit(train=make(), val=None if val is None else val(), **options) and None)


trained("shuffled", lambda: loader(shuffle=True))
trained("an uneven last batch", lambda: loader(44))
trained("rows that do not divide by ranks", lambda: loader(45))
trained("drop_last", lambda: loader(45, drop_last=True))
trained("two workers", lambda: loader(num_workers=2, shuffle=True))
trained("persistent workers", lambda: loader(num_workers=1, persistent_workers=True))
trained("a stream over one generator", lambda: DataLoader(Stream(1), batch_size=ROWS))
trained("a stream, validated within", lambda: DataLoader(Stream(1), batch_size=ROWS), val=loader, val_check_interval=2)
trained("a stream that is limited", lambda: DataLoader(Stream(1, 10**6), batch_size=ROWS), limit_train_batches=5)
trained("rows augmented at random", lambda: DataLoader(Augmented(48), batch_size=ROWS, shuffle=True))
trained(
    "a DistributedSampler of one's own",
    lambda: loader(sampler=DistributedSampler(Rows(48), num_replicas=2, rank=0, shuffle=True, seed=7)),
)
trained("use_distributed_sampler=False", lambda: loader(24), use_distributed_sampler=False)
trained(
    "a batch sampler of one's own",
    lambda: DataLoader(Rows(48), batch_sampler=BatchSampler(RandomSampler(Rows(48)), ROWS, drop_last=True)),
    use_distributed_sampler=False,
)
trained("a list of batches", lambda: [next(iter(loader(8, seed=seed))) for seed in range(5)])
trained("reload_dataloaders_every_n_epochs", loader, reload_dataloaders_every_n_epochs=1)
trained("no validation data but a validation step", loader, limit_val_batches=1.0)


@uses("a DataModule")
def _(session: Session) -> None:
    class Data(pl.LightningDataModule):
        def prepare_data(self) -> None:
            session.keep("hooks", ["prepare"])

        def setup(self, stage: str) -> None:
            session.keep("hooks", [stage])
            self.rows = Rows(48)

        def train_dataloader(self) -> Any:
            session.keep("hooks", ["train"])
            return DataLoader(self.rows, batch_size=ROWS, shuffle=True)

        def val_dataloader(self) -> Any:
            session.keep("hooks", ["val"])
            return loader(16, seed=1)

        def teardown(self, stage: str) -> None:
            session.keep("hooks", [f"after {stage}"])

    session.fit(datamodule=Data())
    # A batch is looked at before training, so the loader of training may come before that of validation.
    session.seen["hooks"] = sorted(session.seen["hooks"])


@uses("loaders from the module's hooks, reloaded")
def _(session: Session) -> None:
    class Net(Project):
        def train_dataloader(self) -> Any:
            return loader(24, seed=self.current_epoch, shuffle=True)

        def val_dataloader(self) -> Any:
            return loader(16, seed=1)

    trainer = session.trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3)
    module = Net()
    trainer.fit(module)
    session.keep_state(trainer, module)


class Both(Project):
    """Trains on batches from two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
        loss = torch.stack([self.loss(part) for part in parts]).mean()
        self.log("train_loss", loss, batch_size=ROWS)
        return loss


def combined(mode: str) -> None:
    """One use of two loaders together."""

    def run(session: Session) -> None:
        session.fit(Both(), CombinedLoader({"a": loader(48), "b": loader(32, seed=2)}, mode))

    uses(f"CombinedLoader, {mode}")(run)


combined("min_size")
combined("max_size_cycle")
combined("max_size")
uses("two loaders in a list")(lambda session: session.fit(Both(), [loader(48), loader(32, seed=2)]) and None)


@uses("CombinedLoader, sequential")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.loss(batch)

    session.fit(Net(), CombinedLoader([loader(24), loader(16, seed=2)], "sequential"))


@uses("batches as tuples")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return self.loss({"x": x, "y": y})

    data = Rows(48)
    rows = list(zip(data.data["x"], data.data["y"], strict=True))
    session.fit(Net(), DataLoader(rows, batch_size=ROWS))


@uses("batches as named tuples")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss({"x": batch.x, "y": batch.y})

    data = Rows(48)
    session.fit(Net(), DataLoader([Pair(*row) for row in zip(data.data["x"], data.data["y"], strict=True)], ROWS))


@dataclass
class Batch:
    """A batch that is no dictionary."""

    x: Tensor
    y: Tensor


@uses("batches as dataclasses")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss({"x": batch.x, "y": batch.y})

    def joined(rows: Any) -> Batch:
        return Batch(**{name: torch.stack([row[name] for row in rows]) for name in "xy"})

    session.fit(Net(), loader(collate_fn=joined))


@uses("texts beside tensors")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            session.keep("names", [batch["name"]])
            return self.loss(batch)

    rows = [row | {"name": f"row {index}"} for index, row in enumerate(Rows(48))]  # type: ignore[arg-type]
    session.fit(Net(), DataLoader(rows, batch_size=ROWS))  # type: ignore[arg-type]


@uses("batches changed by transfer hooks")
def _(session: Session) -> None:
    class Net(Project):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch | {"x": batch["x"].roll(1, 1)}

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch | {"y": batch["y"].flip(1)}

    session.fit(Net(), val=loader(16, seed=1))


@uses("sequences of changing lengths")
def _(session: Session) -> None:
    def cut(rows: Any) -> Any:
        batch = torch.utils.data.default_collate(rows)
        length = 3 + int(batch["index"][0]) % 4
        return {name: batch[name][:, :length] for name in "xy"}

    session.fit(train=loader(collate_fn=cut))


@uses("dataloader_iter in the step")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    session.fit(Net())


@uses("no training data")
def _(session: Session) -> None:
    session.trainer().fit(Project())
