"""The tensor-parallel ranks of a stage over a transport."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mist.runtime.communication.transport import Transport
from lightning_mist.tensor_parallel.group import Reduction


class TransportGroup:
    """A :class:`~lightning_mist.tensor_parallel.group.TensorGroup` that waits for every collective.

    Args:
        transport: Connects the ranks; must have a process group of them.
        ranks: Global ranks by tensor-parallel index, the transport's own among them.

    Attributes:
        rank: This rank's tensor-parallel index.
        size: Number of ranks.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport, self._group = transport, tuple(sorted(ranks))
        self.rank, self.size = tuple(ranks).index(transport.rank), len(ranks)
        # A transport's groups are sorted by global rank, the plan's devices need not be.
        self._places = [self._group.index(rank) for rank in ranks]
        self._indices = [tuple(ranks).index(rank) for rank in self._group]
        self._is_sorted = self._places == list(range(self.size))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The sum or maximum over the ranks, a new tensor."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._transport.all_reduce(result, self._group, reduction).wait()
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked along a new first dimension in the order of ranks."""
        result = self._transport.all_gather(tensor.detach(), self._group).result()
        return result if self._is_sorted else result[self._places]

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Of a tensor with one entry per rank along its first dimension: the sum over ranks of this rank's entry."""
        tensor = tensor.detach()
        if not self._is_sorted:
            tensor = tensor[self._indices]
        return self._transport.reduce_scatter(tensor, self._group).result()
