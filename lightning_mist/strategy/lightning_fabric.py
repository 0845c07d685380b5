"""The strategy for projects that import ``lightning_fabric``."""

from lightning_mist.strategy.fabric import build_fabric

MistFabricStrategy = build_fabric("lightning_fabric", __name__)
