"""Parameters in parts: cut, put together, and as the module sees them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.plan.tensor_split import ParameterSplit
from lightning_mist.tensor_parallel.context import SplitContext
from lightning_mist.tensor_parallel.shard_layout import Layout, join_parts, take
from lightning_mist.tensor_parallel.tensor import SplitTensor, wrap


def layout_of_split(split: ParameterSplit, sizes: Sequence[int]) -> Layout:
    """The layout of a parameter of a whole shape."""
    outer = 1
    for size, is_shared in split.factors:
        if is_shared:
            break
        outer *= size
    return Layout(tuple(sizes), split.dim % len(sizes), outer)


def shard(full: Tensor, split: ParameterSplit, rank: int, degree: int) -> Tensor:
    """What one rank of ``degree`` has of a tensor; contiguous, with memory of its own.

    Args:
        full: The whole tensor.
        split: Which factor of which dimension is shared out.
        rank: Index of the rank.
        degree: Number of ranks.

    Raises:
        TraceError: If the degree does not divide what is shared out.
    """
    size = next(size for size, is_shared in split.factors if is_shared)
    if size % degree or full.shape[split.dim] != split.size:
        raise TraceError(
            f"{split.name} of shape {tuple(full.shape)} shared out as {split.factors} along dimension {split.dim} over "
            f"{degree} ranks: the factor of {size} must be a multiple of {degree}"
        )
    part = take(full.detach(), layout_of_split(split, full.shape), rank, degree)
    return part.clone(memory_format=torch.contiguous_format)


def unshard(parts: Sequence[Tensor], split: ParameterSplit) -> Tensor:
    """The whole tensor from the parts of all ranks, in their order."""
    sizes = list(parts[0].shape)
    sizes[split.dim] *= len(parts)
    return join_parts(torch.stack(tuple(parts)), layout_of_split(split, sizes), len(parts))


def present(local: Tensor, split: ParameterSplit, context: SplitContext) -> SplitTensor:
    """A parameter as the module shall see it: whole, with this rank's part inside.

    Args:
        local: This rank's part, as :func:`shard` makes it; gradients arrive in it.
        split: How the parameter is shared out.
        context: The ranks.
    """
    sizes = list(local.shape)
    sizes[split.dim] *= context.degree
    tensor = wrap(local, layout_of_split(split, sizes), context)
    tensor._is_param = True  # isinstance(tensor, nn.Parameter) holds, as modules expect
    return tensor
