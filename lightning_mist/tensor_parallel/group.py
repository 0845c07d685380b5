"""What sharded tensors need of the ranks that share them."""

from typing import Literal, Protocol

from torch import Tensor

Reduction = Literal["sum", "max"]
"""How values of several ranks become one."""


class TensorGroup(Protocol):
    """The tensor-parallel ranks of one stage, seen from one of them. Every call blocks until its result may be used.

    All ranks of a group make the same calls in the same order. Tensors given are contiguous and are not changed.

    Attributes:
        rank: This rank's index in the group.
        size: Number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The sum or maximum over the ranks, a new tensor."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked along a new first dimension in the order of ranks."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Of a tensor with one entry per rank along its first dimension: the sum over ranks of this rank's entry."""
