"""A tensor's part of one rank, and the whole from all parts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mist.plan.tensor_split import ParameterSplit


def shard(full: Tensor, split: ParameterSplit, rank: int, degree: int) -> Tensor:
    """What one rank of ``degree`` has of a tensor; contiguous, with memory of its own.

    Args:
        full: The whole tensor.
        split: Which factor of which dimension is shared out.
        rank: Index of the rank.
        degree: Number of ranks; divides the shared factor.
    """
    sizes, at = [size for size, _ in split.factors], split.dim + _shared(split)
    before, after = full.shape[: split.dim], full.shape[split.dim + 1 :]
    count = sizes[_shared(split)]
    part = full.detach().reshape(*before, *sizes, *after).narrow(at, rank * (count // degree), count // degree)
    return part.reshape(*before, split.size // degree, *after).clone(memory_format=torch.contiguous_format)


def unshard(parts: Sequence[Tensor], split: ParameterSplit) -> Tensor:
    """The whole tensor from the parts of all ranks, in their order."""
    degree, first = len(parts), parts[0]
    sizes = [size // degree if is_shared else size for size, is_shared in split.factors]
    before, after = first.shape[: split.dim], first.shape[split.dim + 1 :]
    whole = torch.cat([part.reshape(*before, *sizes, *after) for part in parts], split.dim + _shared(split))
    return whole.reshape(*before, split.size, *after)


def _shared(split: ParameterSplit) -> int:
    """Index of the factor that is shared out."""
    return next(index for index, (_, is_shared) in enumerate(split.factors) if is_shared)
