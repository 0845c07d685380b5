"""The strategy for projects that import ``lightning.pytorch``."""

from lightning.pytorch.strategies import DDPStrategy

from lightning_mist.strategy.given_arguments import Namespace
from lightning_mist.strategy.strategy import MistBase


class MistStrategy(MistBase, DDPStrategy):  # noqa: D101
    __doc__ = MistBase.__doc__
    _names = Namespace("lightning.pytorch")
