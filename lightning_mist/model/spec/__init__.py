"""What a network is, as data: layers, tensors, parameters, allocation events, counts as expressions."""

from lightning_mist.model.spec.allocation_events import (
    Allocation,
    Anchor,
    Direction,
    LayerEvents,
    PartEvents,
    Release,
    Role,
    StepPoint,
)
from lightning_mist.model.spec.model_spec import (
    MASTERS_PRECISION,
    CollectiveSpec,
    LayerSeconds,
    LayerSpec,
    ModelSpec,
    OperatorCost,
    OperatorKind,
    OptimizerSpec,
    ParameterSpec,
    SelectiveSpec,
    SplitSpec,
    TensorSpec,
    with_master_weights,
)
from lightning_mist.model.spec.polynomial import (
    BILINEAR,
    CONSTANT,
    MICROBATCH,
    QUADRATIC,
    SEQUENCE,
    Basis,
    Coefficients,
    MisfitError,
    Point,
    Polynomial,
    bytes_at,
    highest,
    values_at,
)
