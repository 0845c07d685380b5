"""Planning changes nothing: data that remembers, state outside the module, and what a step writes down."""

import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from tests.traps.project import ROWS, Project, Rows, Trap, loader


class Stream(IterableDataset):
    """Rows of one generator that goes on from epoch to epoch."""

    def __init__(self):
        rows = Rows(4096)
        self.generator = (rows[index] for index in itertools.cycle(range(4096)))

    def __iter__(self):
        return itertools.islice(self.generator, 24)


class Augmented(Rows):
    """Draws from generators of its own and from global ones."""

    def __init__(self):
        super().__init__(48)
        self.own, self.numpy = random.Random(1), np.random.default_rng(2)

    def __getitem__(self, index):
        row = super().__getitem__(index)
        scale = self.own.random() + self.numpy.random() + random.random() + np.random.rand() + float(torch.rand(()))
        return {**row, "w": row["w"] * scale}


class Weighted(Project):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * batch["w"].mean()


GLOBAL = {"calls": 0}
COUNT = itertools.count(1)
ARRAY = np.zeros(1)


class Counting(Project):
    """Its loss depends on how often the step was called, by counters of every kind."""

    calls = 0
    metric_sum = 0.0

    def __init__(self):
        super().__init__()
        self.metric, self.kept, self.own = MeanMetric(), torch.zeros(1), []
        self.seen = []

    def on_train_start(self):
        self.seen += [float(self.metric.weight), float(self.kept), len(self.own)]

    def training_step(self, batch, batch_idx):
        type(self).calls += 1
        GLOBAL["calls"] += 1
        ARRAY[0] += 1
        self.own.append(1)
        self.kept += 1
        count = type(self).calls + GLOBAL["calls"] + next(COUNT) + ARRAY[0] + len(self.own) + float(self.kept)
        loss = self.loss(batch) * (1 + 0.01 * float(count))
        self.metric.update(loss.detach())
        return loss


class Writing(Project):
    """Appends a line to a file in every step."""

    def __init__(self):
        super().__init__()
        self.path, self.seen = Path(tempfile.mkdtemp()) / "lines", []

    def training_step(self, batch, batch_idx):
        with self.path.open("a") as file:
            file.write("step\n")
        return self.loss(batch)

    def on_train_end(self):
        self.seen.append(len(self.path.read_text().splitlines()))


class Late(Project):
    """Uses what its own hooks make."""

    def on_train_start(self):
        self.scale = 0.5

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.scale


class Asserting(Project):
    def training_step(self, batch, batch_idx):
        assert self.trainer.state.stage == "train"
        assert self.trainer.fit_loop.epoch_loop._batches_that_stepped == self.global_step
        assert self.trainer.fit_loop._data_fetcher.fetched > 0
        return self.loss(batch)


class Sometimes(Project):
    """Gives no loss for some batches."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 0 else self.loss(batch)


class Normed(Project):
    """Batch norm and a metric that looks at values."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(self.head.in_features).double()
        self.accuracy = MeanMetric()

    def training_step(self, batch, batch_idx):
        hidden = self.norm(self.hidden(batch).mean(1))
        loss = F.cross_entropy(self.pair(hidden), batch["z"])
        if float(loss) > 1e6:
            raise ValueError("diverged")
        self.accuracy.update(loss.detach())
        self.log("mean", self.accuracy, on_epoch=True)
        return loss + 0.0 * self.head.weight.sum() + 0.0 * self.head.bias.sum()


class Nothing(Project):
    def configure_optimizers(self):
        return None


class Lbfgs(Project):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=1e-2, max_iter=2)


AUTO = ("auto", "searched")
TRAPS = {
    "stream over one generator": Trap(train=lambda: DataLoader(Stream(), batch_size=ROWS), plans=AUTO, equal=AUTO),
    "dataset that augments": Trap(
        module=Weighted, train=lambda: DataLoader(Augmented(), batch_size=ROWS), plans=AUTO, equal=AUTO
    ),
    "counters": Trap(module=Counting, plans=AUTO, equal=AUTO),
    "lines in a file": Trap(module=Writing, plans=AUTO, equal=AUTO),
    "what hooks make": Trap(module=Late, plans=("auto",), equal=AUTO),
    "asserts": Trap(module=Asserting, plans=("searched",), equal=AUTO),
    "no loss at times": Trap(module=Sometimes, plans=("auto",)),
    "batch norm and a metric": Trap(module=Normed, plans=("searched",), equal=AUTO),
    "no optimizer": Trap(module=Nothing, plans=("searched",), equal=AUTO),
    "LBFGS": Trap(module=Lbfgs, plans=("auto",), equal=AUTO),
    "a validation that cannot be": Trap(
        train=lambda: DataLoader(Stream(), batch_size=ROWS),
        val=loader,
        trainer={"val_check_interval": 0.5},
        plans=("searched",),
    ),
    "development run": Trap(
        module=Counting, trainer={"fast_dev_run": 2, "max_epochs": None}, plans=("searched",), equal=("searched",)
    ),
    "the same batches again": Trap(
        train=loader, trainer={"overfit_batches": 2}, plans=("searched",), equal=("searched",)
    ),
}
