"""The strategy for projects that import ``lightning.fabric``."""

from lightning_mist.strategy.fabric import build_fabric

MistFabricStrategy = build_fabric("lightning.fabric", __name__)
