"""What a network is, as data: layers, tensors, parameters, allocation events, counts as expressions."""

from lightning_mist.model.spec.allocation_events import (
    Allocation,
    Anchor,
    Direction,
    LayerEvents,
    Moment,
    PartEvents,
    Release,
    Role,
)
from lightning_mist.model.spec.model_spec import (
    CollectiveSpec,
    LayerSeconds,
    LayerSpec,
    ModelSpec,
    OperatorCost,
    OptimizerSpec,
    ParameterSpec,
    SplitSpec,
    TensorSpec,
)
from lightning_mist.model.spec.polynomial import Polynomial, values_at
from lightning_mist.model.spec.polynomial_fit import (
    BILINEAR,
    CONSTANT,
    QUADRATIC,
    Basis,
    Coefficients,
    MisfitError,
    Point,
    undominated,
)
from lightning_mist.model.spec.symbols import MICROBATCH, SEQUENCE, bytes_at
from lightning_mist.model.spec.work_kinds import OperatorKind

__all__ = [
    "BILINEAR",
    "CONSTANT",
    "MICROBATCH",
    "QUADRATIC",
    "SEQUENCE",
    "Allocation",
    "Anchor",
    "Basis",
    "Coefficients",
    "CollectiveSpec",
    "Direction",
    "LayerEvents",
    "LayerSeconds",
    "LayerSpec",
    "MisfitError",
    "ModelSpec",
    "Moment",
    "OperatorCost",
    "OperatorKind",
    "OptimizerSpec",
    "ParameterSpec",
    "PartEvents",
    "Point",
    "Polynomial",
    "Release",
    "Role",
    "SplitSpec",
    "TensorSpec",
    "bytes_at",
    "undominated",
    "values_at",
]
