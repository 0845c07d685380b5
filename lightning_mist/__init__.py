"""A training planner and runtime for PyTorch Lightning: ``Trainer(strategy="mist")``.

Importing this package registers the strategy's names and does nothing else: the names below are imported when they are
first used.
"""

from typing import TYPE_CHECKING, Any

from lightning_mist import _autoload

if TYPE_CHECKING:
    from lightning_mist.errors import InfeasibleError, MistError, PlanError, ProfileError, ScheduleError, TraceError
    from lightning_mist.estimate import MemoryEstimate, estimate_memory
    from lightning_mist.hardware import Cluster, HardwareProfile
    from lightning_mist.model import trace_model
    from lightning_mist.plan import Checkpointing, OffloadRatios, Plan, SearchSpace, StagePlan, ZeroStage, plan_of
    from lightning_mist.strategy.fabric_of_lightning import MistFabricStrategy
    from lightning_mist.strategy.lightning import MistStrategy
    from lightning_mist.tuner import tune
    from lightning_mist.without_values import register_memory_rule

__version__ = "0.1.0"

__all__ = [
    "Checkpointing",
    "Cluster",
    "HardwareProfile",
    "InfeasibleError",
    "MemoryEstimate",
    "MistError",
    "MistFabricStrategy",
    "MistStrategy",
    "OffloadRatios",
    "Plan",
    "PlanError",
    "ProfileError",
    "ScheduleError",
    "SearchSpace",
    "StagePlan",
    "TraceError",
    "ZeroStage",
    "estimate_memory",
    "plan_of",
    "register_memory_rule",
    "trace_model",
    "tune",
]

_HOMES = {
    "estimate": ("MemoryEstimate", "estimate_memory"),
    "errors": ("InfeasibleError", "MistError", "PlanError", "ProfileError", "ScheduleError", "TraceError"),
    "hardware": ("Cluster", "HardwareProfile"),
    "model": ("trace_model",),
    "plan": ("Checkpointing", "OffloadRatios", "Plan", "SearchSpace", "StagePlan", "ZeroStage", "plan_of"),
    "tuner": ("tune",),
    "without_values": ("register_memory_rule",),
}

_autoload.autoload()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("MistStrategy", "mist"):  # command lines take classes for what is given options
        return import_module(_module_of(_autoload.STRATEGIES)).MistStrategy
    if name == "MistFabricStrategy":
        return import_module(_module_of(_autoload.FABRICS)).MistFabricStrategy
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _module_of(homes: dict[str, str]) -> str:
    """The module of ours for the one of two copies of Lightning, or of Fabric, that this program uses.

    They are separate, and a ``Trainer`` refuses the other one's strategies. Looked up at each use, since which one has
    been imported may change.
    """
    import sys

    is_imported = [name.rpartition(".")[0] in sys.modules for name in homes]
    return list(homes.values())[is_imported == [False, True]]
