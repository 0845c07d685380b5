"""What the network is: where it can be cut and what it costs, as expressions.

What traces modules needs torch: the modules of names that do are imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_mist.model.child_process import run_apart
from lightning_mist.model.spec import MASTERS_PRECISION, LayerSeconds, ModelSpec, OptimizerSpec, with_master_weights

if TYPE_CHECKING:
    from lightning_mist.model.cuts import find_blocks, map_module
    from lightning_mist.model.device import DeviceOperators, device_operators
    from lightning_mist.model.layer_timing import attach_seconds, measured_sizes, time_layers, time_update
    from lightning_mist.model.split import OptimizerRule, derive_contexts, derive_splits, examine_optimizer
    from lightning_mist.model.trace import describe_optimizer, optimizer_class, optimizer_to_describe, trace_model


_HOMES = {
    "cuts": ("find_blocks", "map_module"),
    "device": ("DeviceOperators", "device_operators"),
    "split": ("OptimizerRule", "derive_contexts", "derive_splits", "examine_optimizer"),
    "layer_timing": ("attach_seconds", "measured_sizes", "time_layers", "time_update"),
    "trace": ("describe_optimizer", "optimizer_class", "optimizer_to_describe", "trace_model"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
