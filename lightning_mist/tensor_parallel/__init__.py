"""Tensors whose parts lie on several ranks and that show their whole shape."""

from lightning_mist.tensor_parallel import rules_elementwise, rules_products, rules_reduce, rules_shape
from lightning_mist.tensor_parallel.collectives import CountingGroup, TensorGroup, copy_in, enter
from lightning_mist.tensor_parallel.parts import (
    enter_sequence,
    from_local_sequence,
    leaving,
    part_of,
    present,
    shard,
    split_sequence,
    to_local_sequence,
    unshard,
)
from lightning_mist.tensor_parallel.shard_layout import Layout
from lightning_mist.tensor_parallel.tensor import (
    SplitContext,
    SplitTensor,
    functions_of_wholes,
    gathered,
    layout_of,
    local_of,
    whole,
)
from lightning_mist.tensor_parallel.threads import ThreadGroup, run_ranks
