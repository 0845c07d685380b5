"""What the network is: where it can be cut and what it costs, as expressions.

What traces modules needs torch: the modules of names that do are imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_mist.model.apart import run_apart
from lightning_mist.model.events import Allocation, LayerEvents, Moment, PartEvents, Release
from lightning_mist.model.polynomial import Polynomial
from lightning_mist.model.spec import (
    LayerSeconds,
    LayerSpec,
    ModelSpec,
    OperatorCost,
    OptimizerSpec,
    ParameterSpec,
    TensorSpec,
)
from lightning_mist.model.symbols import MICROBATCH, SEQUENCE
from lightning_mist.model.work_kinds import OperatorKind

if TYPE_CHECKING:
    from lightning_mist.model.blocks import find_blocks
    from lightning_mist.model.cuts import map_module
    from lightning_mist.model.device_table import DeviceOperators, device_operators
    from lightning_mist.model.elementwise import counting_reason, coupling_reason, whole_tensor_reason
    from lightning_mist.model.memory_rules import register_memory_rule
    from lightning_mist.model.optimizer import describe_optimizer, optimizer_class
    from lightning_mist.model.own_optimizer import optimizer_to_describe
    from lightning_mist.model.splits import derive_splits
    from lightning_mist.model.timing import attach_seconds, measured_sizes, time_layers
    from lightning_mist.model.trace import trace_model
    from lightning_mist.model.update_timing import time_update

__all__ = [
    "MICROBATCH",
    "SEQUENCE",
    "Allocation",
    "DeviceOperators",
    "LayerEvents",
    "LayerSeconds",
    "LayerSpec",
    "ModelSpec",
    "Moment",
    "OperatorCost",
    "OperatorKind",
    "OptimizerSpec",
    "ParameterSpec",
    "PartEvents",
    "Polynomial",
    "Release",
    "TensorSpec",
    "attach_seconds",
    "counting_reason",
    "coupling_reason",
    "derive_splits",
    "describe_optimizer",
    "device_operators",
    "find_blocks",
    "map_module",
    "measured_sizes",
    "optimizer_class",
    "optimizer_to_describe",
    "register_memory_rule",
    "run_apart",
    "time_layers",
    "time_update",
    "trace_model",
    "whole_tensor_reason",
]

_HOMES = {
    "blocks": ("find_blocks",),
    "cuts": ("map_module",),
    "device_table": ("DeviceOperators", "device_operators"),
    "elementwise": ("counting_reason", "coupling_reason", "whole_tensor_reason"),
    "memory_rules": ("register_memory_rule",),
    "optimizer": ("describe_optimizer", "optimizer_class"),
    "own_optimizer": ("optimizer_to_describe",),
    "splits": ("derive_splits",),
    "timing": ("attach_seconds", "measured_sizes", "time_layers"),
    "trace": ("trace_model",),
    "update_timing": ("time_update",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
