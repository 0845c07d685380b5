"""What single operators cost: FLOPs, bytes, kinds, and rules for those that nobody can look into."""

from lightning_mist.model.operators.linear_calls import LinearCall, LinearMode, seen_through
from lightning_mist.model.operators.operator_costs import (
    computes,
    flops,
    moved_bytes,
    narrow_type,
    storage_key,
    tensors_in,
    written,
)
from lightning_mist.model.operators.operator_kinds import kind_of
