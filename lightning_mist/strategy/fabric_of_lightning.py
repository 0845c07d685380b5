"""The strategy for projects that import ``lightning.fabric``."""

from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_mist.strategy.fabric import MistFabricBase
from lightning_mist.strategy.given_arguments import with_words_of
from lightning_mist.strategy.strategy import MistBase


class MistFabricStrategy(MistFabricBase, DDPStrategy):  # noqa: D101
    __doc__ = with_words_of(MistFabricBase, MistBase)
