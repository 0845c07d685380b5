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
    stages_dealt,
    with_offload,
)
from lightning_mist.tuner.space.usable_memory import (
    USABLE_MEMORY,
    check_memory_limit,
    host_bytes_of_each,
    host_notes,
    least_of_stages,
    tensor_share,
    usable_bytes,
    usable_of_parts,
)
