"""How tensors get from rank to rank: a protocol, and its implementations over torch.distributed and in memory."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Work(Protocol):
    """A transfer or collective in progress."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self) -> None:
        """Block until the transfer is complete and its results may be read."""


class Transport(Protocol):
    """What one rank needs to talk to the others. Every method returns at once; groups are sorted global ranks.

    Calls on one group must come in the same order on each of its ranks. Point-to-point messages between two ranks
    arrive in the order of their tags' posting.
    """

    rank: int
    world_size: int

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """Send a contiguous tensor; it must not change until the work is complete."""

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Receive into a contiguous tensor."""

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Work:
        """Sum a contiguous tensor over the group, in place."""

    def reduce(self, tensor: Tensor, destination: int, group: Sequence[int]) -> Work:
        """Sum a contiguous tensor over the group into the destination's tensor; others' contents are undefined."""

    def broadcast(self, tensor: Tensor, source: int, group: Sequence[int]) -> Work:
        """Copy the source's contiguous tensor to every rank of the group."""

    def all_gather_object(self, value: Any, group: Sequence[int]) -> "ObjectWork":
        """Give every rank of the group the picklable values of all, in group order."""


class ObjectWork(Work, Protocol):
    """A gathering of Python objects in progress."""

    def result(self) -> list[Any]:
        """The gathered values, after completion."""
