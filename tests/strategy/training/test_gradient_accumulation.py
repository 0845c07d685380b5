from functools import wraps
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_mist.strategy.training.whole_model import gradients_are_about_to_go


def module_of(cls=pl.LightningModule, *, batch_idx=0, every=1, callbacks=(), optimizer=torch.optim.SGD):
    module = cls()
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=batch_idx))
    optimizers = [optimizer([torch.nn.Parameter(torch.ones(1))])]
    trainer = SimpleNamespace(
        fit_loop=loop, accumulate_grad_batches=every, callbacks=list(callbacks), optimizers=optimizers
    )
    return SimpleNamespace(trainer=trainer) if cls is None else _with(module, trainer)


def _with(module, trainer):
    cls = type(module)
    return type(cls.__name__, (cls,), {"trainer": trainer, "__module__": cls.__module__})()


class Looks(Callback):
    def on_before_zero_grad(self, trainer, module, optimizer):
        pass


class Clears(pl.LightningModule):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class LetsGo(pl.LightningModule):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        """As documentation shows it."""
        optimizer.zero_grad(set_to_none=True)


class Written(pl.LightningModule):
    optimizer_zero_grad = lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad()  # noqa: E731


class Wrapped(pl.LightningModule):
    optimizer_zero_grad = wraps(LetsGo.optimizer_zero_grad)(lambda *_: None)


class Any(pl.LightningModule):
    def optimizer_zero_grad(self, *optimizer):
        self.zero_grad()


class KeepsZeros(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


class Zeros(pl.LightningModule):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({}, True),
        ({"batch_idx": 3, "every": 2}, False),
        ({"batch_idx": 4, "every": 2}, True),
        ({"callbacks": [Callback()]}, True),
        ({"callbacks": [Looks()]}, False),
        ({"cls": Clears}, False),
        ({"cls": LetsGo}, True),
        *(({"cls": cls}, False) for cls in (Zeros, Written, Wrapped, Any)),
        ({"optimizer": KeepsZeros}, False),
    ],
)
def test_gradients_go_unless_someone_wants_them(options, gone):
    assert gradients_are_about_to_go(module_of(**options)) is gone
