"""Taking one batch before training changes nothing that comes after."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.strategy.peek import peek_batch


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].flatten().tolist())
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peeking(SingleDeviceStrategy):
    """Takes a batch during setup, as planning does."""

    def __init__(self, error=None):
        super().__init__(device="cpu")
        self.error = error
        self.peeked = None

    def setup(self, trainer):
        super().setup(trainer)
        with isolate_rng():
            self.peeked = peek_batch(trainer, self)
        if self.error is not None:
            raise self.error


def fit(strategy, **options):
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=2, logger=False, barebones=True, **{"devices": 1, **options}
    )
    loader = DataLoader(TensorDataset(torch.arange(10.0).view(10, 1)), batch_size=3, shuffle=True)
    module = Module()
    trainer.fit(module, loader)
    return module.seen


def test_training_sees_the_batches_it_would_have_seen():
    strategy = Peeking()
    seen = fit(strategy)
    assert seen == fit(SingleDeviceStrategy(device="cpu"))
    assert len(seen) == 8
    assert strategy.peeked[0].shape == (3, 1)


def test_an_error_of_planning_arrives_as_it_was_raised():
    with pytest.raises(PlanError, match="no plan") as caught:
        fit(Peeking(PlanError("no plan")))
    assert caught.value.__context__ is None


def test_no_training_batch_is_refused():
    with pytest.raises(TraceError, match="limit_train_batches=0"):
        fit(Peeking(), limit_train_batches=0)
