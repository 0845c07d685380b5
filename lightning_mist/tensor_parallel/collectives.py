"""What sharded tensors need of the ranks that share them, a group that only counts, and collectives for autograd.

Two kinds of values take part. A *replicated* value is equal on all ranks, and so is its gradient. Of a *part* every
rank holds its own, with the true gradient of that part. Each function below turns one into the other so that both
rules hold again behind it, in forward and in backward; the loss counts once, not once per rank.

In a group that *adds later* a replicated value's gradient is a summand on every rank, and only the sum over ranks is
the gradient. Nothing is then communicated for the weights that every rank uses on its part: whoever adds up gradients
of the ranks with the same parameters does it once, behind the last backward. :func:`leave` shares out the gradient of
what all ranks give, :func:`enter` adds up that of what all ranks were given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_mist.tensor_parallel.shard_layout import Layout, join_parts, stack_parts, take

Reduction = Literal["sum", "max"]
"""How values of several ranks become one."""


class TensorGroup(Protocol):
    """The ranks of one stage that compute on the same rows, seen from one of them.

    Every call blocks until its result may be used. All ranks of a group make the same calls in the same order. Tensors
    given are contiguous and are not changed.

    Attributes:
        adds_later: Whether ranks leave gradients of what all of them hold as summands, which are added up over the
            ranks with the same parameters behind the last backward (context parallelism).
    """

    rank: int
    size: int
    adds_later: bool

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The sum or maximum over the ranks, a new tensor."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked along a new first dimension in the order of ranks."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Of a tensor with one entry per rank along its first dimension: the sum over ranks of this rank's entry."""


Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""A collective of a group."""


class CountingGroup:
    """Answers collectives, as rank 0, with tensors of the right shape and no meaning; for costs on fake tensors.

    Attributes:
        watcher: Told of every call its operation and the bytes of the *whole* tensor: of the tensor reduced, of all
            parts gathered, of all entries scattered.
    """

    rank = 0

    def __init__(self, size: int, *, adds_later: bool = False) -> None:
        self.size, self.adds_later = size, adds_later
        self.watcher: Callable[[Operation, int], None] = lambda *_: None

    def _note(self, operation: Operation, tensor: Tensor, count: int = 1) -> None:
        self.watcher(operation, count * tensor.numel() * tensor.element_size())

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """A tensor of the same shape."""
        self._note("all_reduce", tensor)
        return torch.empty_like(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """A tensor with one more dimension in front."""
        self._note("all_gather", tensor, self.size)
        return tensor.new_empty((self.size, *tensor.shape))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """A tensor without the first dimension."""
        self._note("reduce_scatter", tensor)
        return tensor.new_empty(tensor.shape[1:])


_Change = Callable[[Tensor], Tensor]


class _Through(torch.autograd.Function):
    """A value through one function, and its gradient back through another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: _Change, back: _Change) -> Tensor:
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _through(tensor: Tensor, run: _Change, back: _Change) -> Tensor:
    # Neither may hold the tensor, which would live as long as the graph.
    return _Through.apply(tensor, run, back)  # type: ignore[no-any-return,no-untyped-call]


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _sum(group: TensorGroup, tensor: Tensor) -> Tensor:
    return group.all_reduce(tensor.contiguous())


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
    return _through(tensor, _same, partial(_sum, group))


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated value from outside of the group's computation, whose gradient is to be whole on every rank."""
    if not (group.adds_later and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return _through(tensor, _same, partial(_sum, group))


def leave(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated value that leaves the group's computation, whose gradient comes whole on every rank."""
    if not (group.adds_later and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return _through(tensor, _same, lambda gradient: gradient / group.size)


def reduce(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The replicated sum of values of which every rank holds one summand."""
    back = partial(_sum, group) if group.adds_later else lambda gradient: gradient
    return _through(tensor, lambda summand: _own(_sum(group, summand)), back)


def gather(part: Tensor, layout: Layout, group: TensorGroup, *, is_partial: bool = False) -> Tensor:
    """The whole of a tensor of which every rank holds a part.

    Args:
        is_partial: Whether every rank uses the result for a computation of its own, so that gradients are added up in
            backward. Otherwise all ranks compute the same with it, and each takes its part of one gradient.
    """

    def run(own: Tensor) -> Tensor:
        whole = _all_gather(own, layout, group)
        return whole if is_partial else _own(whole)

    def back(gradient: Tensor) -> Tensor:
        if is_partial or group.adds_later:
            return _reduce_scatter(gradient, layout, group)
        return take(gradient, layout, group.rank, group.size).contiguous()

    return _through(_plain(part), run, back)


def scatter(tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    """This rank's part of a replicated value; gradients of the parts are gathered in backward."""
    tensor = _plain(tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return take(tensor, layout, group.rank, group.size)

    def run(whole: Tensor) -> Tensor:
        # A copy: a view would keep the whole tensor alive for as long as the part.
        return take(whole, layout, group.rank, group.size).clone(memory_format=torch.contiguous_format)

    back = _among_zeros if group.adds_later else _all_gather
    return _through(tensor, run, partial(back, layout=layout, group=group))


def reduce_scatter(tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    """This rank's part of the sum of values of which every rank holds one summand."""
    back = partial(_all_gather, layout=layout, group=group)
    return _through(tensor, lambda summand: _own(_reduce_scatter(summand, layout, group)), back)
