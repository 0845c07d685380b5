"""The strategy for projects that import ``lightning_fabric``."""

from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_mist.strategy.fabric import MistFabricBase
from lightning_mist.strategy.given_arguments import with_words_of
from lightning_mist.strategy.strategy import MistBase

_BODY = {"__module__": __name__, "__doc__": with_words_of(MistFabricBase, MistBase)}
MistFabricStrategy = type("MistFabricStrategy", (MistFabricBase, DDPStrategy), _BODY)
