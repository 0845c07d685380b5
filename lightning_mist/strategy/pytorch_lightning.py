"""The strategy for projects that import ``pytorch_lightning``."""

from pytorch_lightning.strategies import DDPStrategy

from lightning_mist.strategy.given_arguments import Namespace
from lightning_mist.strategy.strategy import MistBase

_BODY = {"__module__": __name__, "__doc__": MistBase.__doc__, "_names": Namespace("pytorch_lightning")}
MistStrategy = type("MistStrategy", (MistBase, DDPStrategy), _BODY)
