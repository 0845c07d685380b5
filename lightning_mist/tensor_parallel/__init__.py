"""Tensors whose parts lie on several ranks and that show their whole shape."""

from lightning_mist.tensor_parallel import rules_attention, rules_linear, rules_loss, rules_pointwise, rules_shape
from lightning_mist.tensor_parallel.counting import CountingGroup
from lightning_mist.tensor_parallel.group import Reduction, TensorGroup
from lightning_mist.tensor_parallel.tensor import (
    SplitContext,
    SplitTensor,
    enter_sequence,
    from_local_sequence,
    functions_of_wholes,
    gathered,
    present,
    shard,
    split_sequence,
    unshard,
    whole,
)
from lightning_mist.tensor_parallel.threads import run_ranks

__all__ = [
    "CountingGroup",
    "Reduction",
    "SplitContext",
    "SplitTensor",
    "TensorGroup",
    "enter_sequence",
    "from_local_sequence",
    "functions_of_wholes",
    "gathered",
    "present",
    "rules_attention",
    "rules_linear",
    "rules_loss",
    "rules_pointwise",
    "rules_shape",
    "run_ranks",
    "shard",
    "split_sequence",
    "unshard",
    "whole",
]
