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
from lightning_mist.model.spec.master_weights import MASTERS_PRECISION, with_master_weights
from lightning_mist.model.spec.model_spec import (
    CollectiveSpec,
    LayerSeconds,
    LayerSpec,
    ModelSpec,
    OperatorCost,
    OperatorKind,
    ParameterSpec,
    SelectiveSpec,
    SplitSpec,
    TensorSpec,
)
from lightning_mist.model.spec.optimizer_spec import OptimizerSpec
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE, Polynomial, bytes_at, values_at
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
