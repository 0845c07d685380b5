"""Collectives as autograd functions: what goes forward in one way comes back in its adjoint.

Each name says what happens forward; its docstring says what its consumers are, which decides what happens backward.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_mist.tensor_parallel.group import TensorGroup


class CopyIn(torch.autograd.Function):
    """A value that every rank has, used by each for a part of the work: the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        """See the class."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The adjoint."""
        return ctx.group.all_reduce(gradients[0].contiguous()), None


class ReduceOut(torch.autograd.Function):
    """Parts of a sum become the sum on every rank; what follows is done by every rank alike."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        """See the class."""
        return group.all_reduce(tensor.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The adjoint."""
        return gradients[0], None


class Gather(torch.autograd.Function):
    """Parts become the whole on every rank.

    ``outer`` blocks of the dimension are each shared out. If every rank does the same with the whole
    (``is_shared_work`` False) the gradients are equal and each keeps its part; if each rank does a part of the work
    they are summed first.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, outer: int, group: TensorGroup, is_shared_work: bool) -> Tensor:
        """See the class."""
        ctx.dim, ctx.outer, ctx.group, ctx.is_shared_work = dim, outer, group, is_shared_work
        return joined(group.all_gather(tensor.contiguous()), dim, outer)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The adjoint."""
        (gradient,) = gradients
        if ctx.is_shared_work:
            parts = divided(gradient, ctx.dim, ctx.outer, ctx.group.size)
            part = ctx.group.reduce_scatter(parts.contiguous())
        else:
            part = own_part(gradient, ctx.dim, ctx.outer, ctx.group)
        return part, None, None, None, None


class Scatter(torch.autograd.Function):
    """Of a value that every rank has, each takes its part: the gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, outer: int, group: TensorGroup) -> Tensor:
        """See the class."""
        ctx.dim, ctx.outer, ctx.group = dim, outer, group
        return own_part(tensor, dim, outer, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The adjoint."""
        return joined(ctx.group.all_gather(gradients[0].contiguous()), ctx.dim, ctx.outer), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Parts of a sum become the rank's part of the sum: the gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
        """See the class."""
        ctx.dim, ctx.group = dim, group
        return group.reduce_scatter(divided(tensor, dim, 1, group.size).contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The adjoint."""
        return joined(ctx.group.all_gather(gradients[0].contiguous()), ctx.dim, 1), None, None


def divided(tensor: Tensor, dim: int, outer: int, degree: int) -> Tensor:
    """The parts of all ranks, stacked along a new first dimension."""
    sizes = tensor.shape
    parts = tensor.reshape(*sizes[:dim], outer, degree, sizes[dim] // (outer * degree), *sizes[dim + 1 :])
    part = (*sizes[:dim], sizes[dim] // degree, *sizes[dim + 1 :])
    return parts.movedim(dim + 1, 0).reshape(degree, *part)


def joined(parts: Tensor, dim: int, outer: int) -> Tensor:
    """The whole from the stacked parts of all ranks."""
    degree, *sizes = parts.shape
    blocks = parts.reshape(degree, *sizes[:dim], outer, sizes[dim] // outer, *sizes[dim + 1 :])
    return blocks.movedim(0, dim + 1).reshape(*sizes[:dim], sizes[dim] * degree, *sizes[dim + 1 :])


def own_part(tensor: Tensor, dim: int, outer: int, group: TensorGroup) -> Tensor:
    """This rank's part, in memory of its own."""
    sizes = tensor.shape
    parts = tensor.reshape(*sizes[:dim], outer, group.size, sizes[dim] // (outer * group.size), *sizes[dim + 1 :])
    part = parts.select(dim + 1, group.rank)
    return part.reshape(*sizes[:dim], sizes[dim] // group.size, *sizes[dim + 1 :]).clone(
        memory_format=torch.contiguous_format
    )
