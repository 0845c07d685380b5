"""The class for ``pytorch_lightning`` beside that for ``lightning.pytorch``; test_lightning.py tests them both."""

import inspect

import pytorch_lightning as pl

from lightning_mist.strategy.lightning import MistStrategy as Other
from lightning_mist.strategy.pytorch_lightning import MistStrategy


def test_a_trainer_of_this_copy_takes_it():
    strategy = MistStrategy()
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert trainer.strategy is strategy
    assert isinstance(trainer.strategy, pl.strategies.DDPStrategy)


def test_the_copies_have_classes_of_their_own_with_the_same_arguments():
    assert MistStrategy is not Other
    assert not issubclass(MistStrategy, Other)
    assert inspect.signature(MistStrategy) == inspect.signature(Other)
    assert inspect.getdoc(MistStrategy) == inspect.getdoc(Other)
    assert issubclass(MistStrategy, pl.strategies.DDPStrategy)
