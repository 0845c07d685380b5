"""What is searched: what a user leaves open, applied to a network, a batch and a machine."""

from lightning_mist.tuner.space.applied_space import (
    ANYWHERE,
    LayerRanges,
    Role,
    Shape,
    Space,
    apply,
    common_unit,
    degrees_to_try,
    divisors,
    fixed_range,
    layer_classes,
    layer_ranges_of,
    places_behind,
    role_of,
    with_offload,
)
from lightning_mist.tuner.space.usable_memory import (
    USABLE_MEMORY,
    at_most,
    check_memory_limit,
    host_bytes_of_each,
    host_notes,
    tensor_share,
    usable_bytes,
)
