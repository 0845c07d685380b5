"""The strategy for projects that import ``pytorch_lightning``."""

from lightning_mist.strategy.strategy import build

MistStrategy = build("pytorch_lightning", __name__)
