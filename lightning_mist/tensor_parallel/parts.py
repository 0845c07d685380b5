"""Parameters and hidden states in parts: cut, put together, and as the module and rules see them.

Sequence parallelism: hidden states between blocks are shared along their sequence (arXiv 2205.05198). So are they under
context parallelism, also inside of blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.shard_layout import Layout, Outer, join_parts, outer_of, take
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor, gathered, wrap


def layout_of_split(split: ParameterSplit, sizes: Sequence[int]) -> Layout:
    """The layout of a parameter of a whole shape."""
    if split.pieces:
        return Layout(tuple(sizes), split.dim % len(sizes), outer_of(split.pieces))
    outer = 1
    for size, is_shared in split.factors:
        if is_shared:
            break
        outer *= size
    return Layout(tuple(sizes), split.dim % len(sizes), outer)


def shard(full: Tensor, split: ParameterSplit, rank: int, degree: int) -> Tensor:
    """What one rank of ``degree`` has of a tensor; contiguous, with memory of its own.

    Raises:
        TraceError: If the degree does not divide what is shared out.
    """
    sizes = split.pieces or [size for size, is_shared in split.factors if is_shared]
    if any(size % degree for size in sizes) or full.shape[split.dim] != split.size:
        named = f"pieces of {', '.join(map(str, sizes))}" if split.pieces else f"factor of {sizes[0]}"
        raise TraceError(
            f"{split.name} of shape {tuple(full.shape)} shared out as {split.pieces or split.factors} along dimension "
            f"{split.dim} over {degree} ranks: the {named} must be a multiple of {degree}"
        )
    return part_of(full.detach(), split, rank, degree).clone(memory_format=torch.contiguous_format)


def part_of(full: Tensor, split: ParameterSplit, rank: int, degree: int) -> Tensor:
    """The same of a tensor that the degree divides, a view where that is possible."""
    return take(full, layout_of_split(split, full.shape), rank, degree)


def unshard(parts: Sequence[Tensor], split: ParameterSplit) -> Tensor:
    """The whole tensor from the parts of all ranks, in their order."""
    sizes = list(parts[0].shape)
    sizes[split.dim] *= len(parts)
    return join_parts(torch.stack(tuple(parts)), layout_of_split(split, sizes), len(parts))


def present(local: Tensor, split: ParameterSplit, context: SplitContext) -> SplitTensor:
    """A parameter as the module shall see it: whole, with this rank's part inside, in which gradients arrive."""
    sizes = list(local.shape)
    sizes[split.dim] *= context.degree
    tensor = wrap(local, layout_of_split(split, sizes), context)
    tensor._is_param = True  # isinstance(tensor, nn.Parameter) holds, as modules expect
    return tensor


def split_sequence(tensor: Tensor, dim: int, context: SplitContext) -> Tensor:
    """Hidden states shared along their sequence; unchanged if the ranks do not divide its length."""
    layout = context.sequence_layout(tuple(tensor.shape), dim)
    if isinstance(tensor, SplitTensor):
        if layout is None or tensor.placement == layout:
            return tensor
        tensor = gathered(tensor)
    if layout is None:
        return tensor
    return wrap(collectives.scatter(tensor, layout, context.group), layout, context)


def from_local_sequence(local: Tensor, dim: int, context: SplitContext) -> SplitTensor:
    """Hidden states of which this rank has one run of tokens already, as it comes from another stage."""
    dim %= local.dim()
    sizes = (*local.shape[:dim], local.shape[dim] * context.degree, *local.shape[dim + 1 :])
    if not context.adds_later:
        context.sequence_layout(sizes, dim)
    return wrap(local, Layout(sizes, dim), context)


def to_local_sequence(tensor: Tensor, dim: int, context: SplitContext) -> Tensor:
    """This rank's run of tokens of hidden states whose length the ranks divide, as it goes to another stage."""
    layout = Layout(tuple(tensor.shape), dim % tensor.dim())
    if isinstance(tensor, SplitTensor) and tensor.placement == layout:
        return tensor.local
    return collectives.scatter(gathered(tensor), layout, context.group)


def leaving(value: Any, context: SplitContext) -> Any:
    """What ranks that share a computation give together: whole on each of them, and counted once in backward."""
    return tree_map_only(Tensor, lambda leaf: collectives.leave(gathered(leaf), context.group), value)


def enter_sequence(
    args: tuple[Any, ...], kwargs: dict[str, Any], split: SequenceSplit, context: SplitContext
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments, hidden states shared along their sequence if the context is sequence parallel."""
    if not context.sequence_parallel:
        return args, kwargs
    leaves, structure = tree_flatten((args, kwargs))
    leaf = leaves[split.leaf]
    if not isinstance(leaf, Tensor) or leaf.dim() <= split.dim:
        return args, kwargs
    leaves[split.leaf] = split_sequence(leaf, split.dim, context)
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


# What rules make of their arguments.


def relayout(context: SplitContext, tensor: SplitTensor) -> Tensor:
    """The whole of a tensor that is shared out in a way that its partners in an operation are not; counted."""
    context.gathered["relayout"] += 1
    return gathered(tensor)


def operand(context: SplitContext, value: Any, target: Layout) -> Any:
    """What a rank computes with, of an operand that broadcasts with a tensor shared out like ``target``."""
    if isinstance(value, SplitTensor):
        if value.placement.is_like(target):
            return value.local
        value = relayout(context, value)
    if not isinstance(value, Tensor):
        return value
    dim = value.dim() + target.from_end
    if dim >= 0 and value.shape[dim] != 1:
        return collectives.scatter(value, Layout(tuple(value.shape), dim, target.outer), context.group)
    return collectives.copy_in(value, context.group)


def part_along(context: SplitContext, value: Tensor, dim: int, outer: Outer) -> Tensor:
    """This rank's part of a value along a dimension, whatever way it is held."""
    dim %= value.dim()
    if isinstance(value, SplitTensor):
        if value.placement.dim == dim and value.placement.outer == outer:
            return value.local
        value = relayout(context, value)
    return collectives.scatter(value, Layout(tuple(value.shape), dim, outer), context.group)


def input_of(context: SplitContext, value: Tensor) -> Tensor:
    """The whole of an input for a computation of which every rank does a part of the outputs."""
    if isinstance(value, SplitTensor):
        if value.placement.is_last:
            context.gathered["relayout"] += 1
        return context.gather_input(value, value.local, value.placement)
    return context.copy_in(value)


def summed(context: SplitContext, summand: Tensor) -> Tensor:
    """The sum over ranks as the module shall see it."""
    total, layout = context.reduce(summand)
    return total if layout is None else wrap(total, layout, context)


def bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Arguments by name, with defaults."""
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
