"""The strategy for projects that import ``lightning.fabric``."""

from lightning_mist.strategy.fabric.strategy import build

MistFabricStrategy = build("lightning.fabric", __name__)
