"""Collectives as autograd functions.

Two kinds of values take part. A *replicated* value is equal on all ranks, and so is its gradient. Of a *part* every
rank holds its own, with the true gradient of that part. Each function below turns one into the other so that both
rules hold again behind it, in forward and in backward; the loss counts once, not once per rank.

In a group that *adds later* a replicated value's gradient is a summand on every rank, and only the sum over ranks is
the gradient. Nothing is then communicated for the weights that every rank uses on its part: whoever adds up gradients
of the ranks with the same parameters does it once, behind the last backward. :func:`leave` shares out the gradient of
what all ranks give, :func:`enter` adds up that of what all ranks were given.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_mist.tensor_parallel.group import TensorGroup
from lightning_mist.tensor_parallel.shard_layout import Layout, join_parts, stack_parts, take


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradients[0].contiguous()), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return _own(group.all_reduce(tensor.contiguous()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.group.adds_later:
            return ctx.group.all_reduce(gradients[0].contiguous()), None
        return gradients[0], None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.size, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: Layout, group: TensorGroup, is_partial: bool) -> Tensor:
        ctx.layout, ctx.group, ctx.is_partial = layout, group, is_partial
        whole = _all_gather(part, layout, group)
        return whole if is_partial else _own(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.is_partial or ctx.group.adds_later:
            return _reduce_scatter(gradients[0], ctx.layout, ctx.group), None, None, None
        part = take(gradients[0], ctx.layout, ctx.group.rank, ctx.group.size)
        return part.contiguous(), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        # A copy: a view would keep the whole tensor alive for as long as the part.
        return take(tensor, layout, group.rank, group.size).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.group.adds_later:
            return _among_zeros(gradients[0], ctx.layout, ctx.group), None, None
        return _all_gather(gradients[0], ctx.layout, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return _own(_reduce_scatter(tensor, layout, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradients[0], ctx.layout, ctx.group), None, None


def _all_gather(part: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    return join_parts(group.all_gather(part.contiguous()), layout, group.size)


def _reduce_scatter(tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    return group.reduce_scatter(stack_parts(tensor, layout, group.size))


def _among_zeros(part: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    """A tensor that has this rank's part, and zeros in the places of the others."""
    parts = part.new_zeros((group.size, *part.shape))
    parts[group.rank] = part
    return join_parts(parts, layout, group.size)


def _own(tensor: Tensor) -> Tensor:
    """A result that user code may write into: autograd forbids that for views made inside a function."""
    return tensor.clone() if tensor._is_view() else tensor


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that holds its values itself: subclasses that do not say how to get one."""
    own = getattr(type(tensor), "plain", None)
    return tensor if own is None else own(tensor)


def copy_in(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated value for use in computations on parts: gradients of the ranks' uses are added up in backward."""
    if group.adds_later or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    own = getattr(type(tensor), "copied_in", None)  # a tensor whose values lie in other ones
    if own is not None:
        return own(tensor, group)  # type: ignore[no-any-return]
    return _CopyIn.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated value from outside of the group's computation, whose gradient is to be whole on every rank."""
    if not (group.adds_later and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return _CopyIn.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]


def leave(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated value that leaves the group's computation, whose gradient comes whole on every rank."""
    if not (group.adds_later and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return _Leave.apply(tensor, group.size)  # type: ignore[no-any-return,no-untyped-call]


def reduce(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The replicated sum of values of which every rank holds one summand."""
    return _Reduce.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]


def gather(part: Tensor, layout: Layout, group: TensorGroup, *, is_partial: bool = False) -> Tensor:
    """The whole of a tensor of which every rank holds a part.

    Args:
        is_partial: Whether every rank uses the result for a computation of its own, so that gradients are added up in
            backward. Otherwise all ranks compute the same with it, and each takes its part of one gradient.
    """
    return _Gather.apply(_plain(part), layout, group, is_partial)  # type: ignore[no-any-return,no-untyped-call]


def scatter(tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    """This rank's part of a replicated value; gradients of the parts are gathered in backward."""
    tensor = _plain(tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return take(tensor, layout, group.rank, group.size)
    return _Scatter.apply(tensor, layout, group)  # type: ignore[no-any-return,no-untyped-call]


def reduce_scatter(tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    """This rank's part of the sum of values of which every rank holds one summand."""
    return _ReduceScatter.apply(tensor, layout, group)  # type: ignore[no-any-return,no-untyped-call]
