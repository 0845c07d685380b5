"""The same for loops that users write: ``Fabric(strategy="mist")``."""

from lightning_mist.strategy.fabric.fabric_strategy import MistFabricBase
