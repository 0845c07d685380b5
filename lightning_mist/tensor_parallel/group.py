"""What sharded tensors need of the ranks that share them, and a group that only counts what is asked of it."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

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
