"""Sequence parallelism: hidden states between blocks are shared along their sequence (arXiv 2205.05198)."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_mist.plan.tensor_split import SequenceSplit
from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.context import SplitContext
from lightning_mist.tensor_parallel.shard_layout import Layout
from lightning_mist.tensor_parallel.tensor import SplitTensor, gathered, wrap


def split_sequence(tensor: Tensor, dim: int, context: SplitContext) -> Tensor:
    """Hidden states shared along their sequence; unchanged if the ranks do not divide its length.

    Args:
        tensor: Hidden states, whole or split.
        dim: The dimension of the sequence.
        context: The ranks.
    """
    layout = context.sequence_layout(tuple(tensor.shape), dim)
    if isinstance(tensor, SplitTensor):
        if layout is None or tensor.placement == layout:
            return tensor
        tensor = gathered(tensor)
    if layout is None:
        return tensor
    return wrap(collectives.scatter(tensor, layout, context.group), layout, context)


def from_local_sequence(local: Tensor, dim: int, context: SplitContext) -> SplitTensor:
    """Hidden states of which this rank has its part already, as from a stage that is split alike."""
    dim %= local.dim()
    sizes = (*local.shape[:dim], local.shape[dim] * context.degree, *local.shape[dim + 1 :])
    layout = context.sequence_layout(sizes, dim)
    return wrap(local, layout or Layout(sizes, dim), context)


def enter_sequence(
    args: tuple[Any, ...], kwargs: dict[str, Any], split: SequenceSplit, context: SplitContext
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with its hidden states shared along their sequence, if the context is sequence parallel.

    Args:
        args: Positional arguments of the block.
        kwargs: Named ones.
        split: Which leaf of ``(args, kwargs)`` holds the hidden states, and which dimension is the sequence.
        context: The ranks.
    """
    if not context.sequence_parallel:
        return args, kwargs
    leaves, structure = tree_flatten((args, kwargs))
    leaf = leaves[split.leaf]
    if not isinstance(leaf, Tensor) or leaf.dim() <= split.dim:
        return args, kwargs
    leaves[split.leaf] = split_sequence(leaf, split.dim, context)
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs
