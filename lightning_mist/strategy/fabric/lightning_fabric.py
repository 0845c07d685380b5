"""The strategy for projects that import ``lightning_fabric``."""

from lightning_mist.strategy.fabric.strategy import build

MistFabricStrategy = build("lightning_fabric", __name__)
