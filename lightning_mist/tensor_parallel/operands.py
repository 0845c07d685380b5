"""What rules make of their arguments."""

from typing import Any

from torch import Tensor

from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.context import SplitContext
from lightning_mist.tensor_parallel.shard_layout import Layout, Outer
from lightning_mist.tensor_parallel.tensor import SplitTensor, gathered, wrap


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
