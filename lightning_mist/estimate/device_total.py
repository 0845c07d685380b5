"""From what the allocator reserves to what the device shows as used."""

from dataclasses import dataclass

from lightning_mist.estimate.allocator import MemoryEvent, malloc
from lightning_mist.estimate.communicators import Communicator
from lightning_mist.hardware.catalog import NOTHING, Overhead, communicator_overhead, context_overhead, workspace_bytes
from lightning_mist.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverheads:
    """What one rank's device holds outside of the caching allocator, and what libraries take inside of it.

    Attributes:
        workspace_bytes: What cuBLAS keeps for each stream that multiplies matrices; tensors to the allocator.
        has_allocator: Whether there is a caching allocator: not on CPU, where what is allocated is the total.
    """

    context: Overhead
    communicators: Overhead
    workspace_bytes: int
    has_allocator: bool

    @property
    def outside(self) -> Overhead:
        """All that is outside of the allocator."""
        return _sum((self.context, self.communicators))


def device_overheads(cluster: Cluster, communicators: tuple[Communicator, ...]) -> DeviceOverheads:
    """What a device of a cluster holds besides tensors.

    Args:
        communicators: Those of the rank; see :func:`~lightning_mist.estimate.communicators.communicators_of`.
    """
    if cluster.device.kind != "cuda":
        return DeviceOverheads(context=NOTHING, communicators=NOTHING, workspace_bytes=0, has_allocator=False)
    return DeviceOverheads(
        context=context_overhead(cluster.device.name),
        communicators=_sum(tuple(communicator_overhead(cluster, len(each.ranks)) for each in communicators)),
        workspace_bytes=workspace_bytes(cluster.device.name),
        has_allocator=True,
    )


def allocator_capacity(cluster: Cluster, overheads: DeviceOverheads) -> int:
    """Bytes that the caching allocator may reserve: the device's less all that is outside, as expected; at least 1."""
    return max(1, cluster.device.memory_bytes - overheads.outside.expected)


def workspaces(nbytes: int, streams: tuple[str, ...] = ("compute",)) -> tuple[MemoryEvent, ...]:
    """What cuBLAS allocates when a stream first multiplies matrices, and never frees; to put before a step's events.

    Their identities are negative, so that those of tensors may count from 0.
    """
    return tuple(malloc(-2 - index, nbytes, stream) for index, stream in enumerate(streams) if nbytes)


def _sum(overheads: tuple[Overhead, ...]) -> Overhead:
    return Overhead(
        expected=sum(overhead.expected for overhead in overheads),
        high=sum(overhead.high for overhead in overheads),
        source="; ".join(dict.fromkeys(overhead.source for overhead in overheads)),
    )
