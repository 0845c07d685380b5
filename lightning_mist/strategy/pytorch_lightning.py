"""The strategy for projects that import ``pytorch_lightning``."""

from pytorch_lightning.strategies import DDPStrategy

from lightning_mist.strategy.given_arguments import Namespace
from lightning_mist.strategy.strategy import MistBase


class MistStrategy(MistBase, DDPStrategy):  # type: ignore[misc]  # noqa: D101  # the base is typed as of lightning.pytorch
    __doc__ = MistBase.__doc__
    _names = Namespace("pytorch_lightning")
