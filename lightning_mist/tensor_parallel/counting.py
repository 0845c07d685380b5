"""A group that moves nothing and counts what would be moved: for costs on tensors without values."""

from dataclasses import dataclass, field

from torch import Tensor

from lightning_mist.tensor_parallel.group import Reduction


@dataclass(slots=True)
class CountingGroup:
    """One rank of a group that is not there.

    Attributes:
        size: Number of ranks.
        rank: This rank's index.
        calls: Operation and bytes of the whole tensor of every call, in order.
    """

    size: int
    rank: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """A tensor of the shape of the sum."""
        self.calls.append(("all_reduce", tensor.numel() * tensor.element_size()))
        return tensor.clone()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """A tensor of the shape of all ranks' tensors."""
        self.calls.append(("all_gather", self.size * tensor.numel() * tensor.element_size()))
        return tensor.new_empty((self.size, *tensor.shape))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """A tensor of the shape of this rank's entry."""
        self.calls.append(("reduce_scatter", tensor.numel() * tensor.element_size()))
        return tensor.new_empty(tensor.shape[1:])
