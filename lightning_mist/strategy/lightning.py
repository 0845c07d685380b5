"""The strategy for projects that import ``lightning.pytorch``."""

from lightning_mist.strategy.strategy import build

MistStrategy = build("lightning.pytorch", __name__)
