"""Lightning comes as ``lightning.pytorch`` and as ``pytorch_lightning``: separate modules with separate classes."""

import importlib
from collections.abc import Mapping
from typing import Any

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class Namespace:
    """What this package needs of one of Lightning's copies, ``"lightning.pytorch"`` or ``"pytorch_lightning"``."""

    def __init__(self, root: str) -> None:
        def find(module: str, name: str) -> Any:
            return getattr(importlib.import_module(f"{root}.{module}"), name)

        self.ddp_strategy = find("strategies", "DDPStrategy")
        self.is_param_in_hook_signature = find("utilities.signature_utils", "is_param_in_hook_signature")
        self.fitting = find("trainer.states", "TrainerFn").FITTING
        self.ends_quietly = find("utilities.exceptions", "_TunerExitException")
        self.set_sampler_epoch = importlib.import_module(f"{_FABRIC[root]}.utilities.data")._set_sampler_epoch


def refuse_unknown(given: Mapping[str, Any], *harmless: str) -> None:
    """Refuse what only later versions of Lightning pass, where it would have to be honoured here."""
    if unknown := sorted(given.keys() - {*harmless}):
        raise TypeError(
            f"Lightning passes {', '.join(unknown)}, of which this version of lightning-mist does not know what it is "
            "to change: take Lightning 2.6, or a later lightning-mist"
        )


def fabric_ddp_strategy(root: str) -> Any:
    """``DDPStrategy`` of a copy of Fabric, ``"lightning.fabric"`` or ``"lightning_fabric"``."""
    return importlib.import_module(f"{root}.strategies").DDPStrategy
