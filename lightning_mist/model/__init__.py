"""What the network is: where it can be cut and what it costs, as expressions."""

from lightning_mist.model.blocks import find_blocks
from lightning_mist.model.cuts import map_module
from lightning_mist.model.spec import (
    LayerSeconds,
    LayerSpec,
    ModelSpec,
    OptimizerSpec,
    ParameterSpec,
    TensorSpec,
)
from lightning_mist.model.symbols import MICROBATCH, SEQUENCE

__all__ = [
    "MICROBATCH",
    "SEQUENCE",
    "LayerSeconds",
    "LayerSpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParameterSpec",
    "TensorSpec",
    "find_blocks",
    "map_module",
]
