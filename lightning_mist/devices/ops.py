"""The protocol that everything which is not computing goes through, on a device and on a host alike.

Streams and events mean what they mean to torch: a stream runs what is launched on it in that order, and nothing else
orders two streams but an event recorded on one that the other waits for. Without a stream, the one that computes is
meant: torch's current stream on a device, the calling thread on a host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a device with a caching allocator; ``used`` by all programs, as the device says."""

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    used: int
    total: int


class DeviceOps(Protocol):
    """What one device can do."""

    device: torch.device
    synchronizations: int
    """How often the caller has waited for the device."""

    def stream(self, *, high_priority: bool = False) -> Any:
        """A stream of its own, beside the one that computes."""

    def launch(
        self,
        work: Callable[[], object],
        stream: Any = None,
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """Put work on a stream, behind what is there.

        Args:
            work: Launches operators or copies that do not block.
            stream: Where; without one it is where computing happens.
            reads: What it reads; like ``writes`` for those alone who watch the order of things.
        """

    def record(self, stream: Any = None, *, timed: bool = False) -> Any:
        """An event that happens when a stream has come to here; ``timed`` if it is for :meth:`seconds`."""

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let a stream wait for an event; the caller does not, except for the calling thread of a host."""

    def synchronize(self, event: Any = None) -> None:
        """Wait, as the caller, for an event, or for everything that was launched; counted."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two timed events that have happened."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Bytes of host memory that copies from and to the device need not wait for (page-locked)."""

    # What follows a kind of device may leave as it is here: it has none of it.

    def mapped_host_memory(self, nbytes: int) -> Tensor:
        """Page-locked host memory in a mapping of its own, of just this size, until nobody has it any more."""
        return self.host_memory(nbytes)

    def memory(self) -> MemoryUse | None:
        """Bytes in use; ``None`` where no allocator counts them."""
        return None

    def reset_peak(self) -> None:
        """Let peaks begin at what is in use now."""
        return

    def release_cached(self) -> None:
        """Give memory back that the allocator holds and nobody uses."""
        return

    def generator(self) -> torch.Generator | None:
        """The default random generator of the device; ``None`` if it is the host's."""
        return None
