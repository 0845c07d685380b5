"""The simulated caching allocator where several streams use the same memory, as by ``record_stream``.

What this runtime allocates is replayed on the stream that allocates, so that the package's simulation knows nothing of
this. Programs of others, and torch's own allocator in random traces, do it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings, Block
from lightning_mist.estimate.allocator.device_allocator import CachingAllocator


class StreamEvent(NamedTuple):
    """One thing that a program asks of the allocator, or that the allocator learns of a stream.

    Attributes:
        kind: ``"malloc"``, ``"free"``, ``"use"`` (another stream works on the memory, as by ``record_stream``) or
            ``"finish"`` (all work issued so far on a stream is known to have ended).
        identity: Which allocation; unique among the living. -1 for ``"finish"``.
        nbytes: Bytes asked for; 0 but for ``"malloc"``.
        stream: The stream that allocates, uses or has finished; empty for ``"free"``.
    """

    kind: Literal["malloc", "free", "use", "finish"]
    identity: int = -1
    nbytes: int = 0
    stream: str = ""


class StreamAllocator(CachingAllocator):
    """An allocator that knows which streams use what others have allocated.

    Attributes:
        active: Bytes ``allocated``, and of what was freed while another stream still uses it; ``peak_active`` the most.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        """Nothing is allocated."""
        super().__init__(settings)
        self.active = self.peak_active = 0
        self._users: dict[Block, set[str]] = {}
        self._waiting: list[Block] = []
        self._has_finished = False

    def malloc(self, identity: int, nbytes: int, stream: str) -> bool:
        """Serve a request, also with memory that streams have finished with since the last one."""
        if nbytes and self._has_finished:
            self._recover_finished()
        before = self.allocated
        is_served = super().malloc(identity, nbytes, stream)
        self.active += self.allocated - before
        self.peak_active = max(self.peak_active, self.active)
        return is_served

    def free(self, identity: int) -> None:
        """Take an allocation back; its memory waits for streams that still use it."""
        block = self._block(identity)
        if block is None or not self._users.get(block):
            super().free(identity)
            return
        del self._living[identity]
        self.allocated -= block.size
        self._waiting.append(block)

    def use(self, identity: int, stream: str) -> None:
        """Another stream works on an allocation."""
        block = self._block(identity)
        if block is not None and stream != block.pool.stream:
            self._users.setdefault(block, set()).add(stream)

    def finish(self, stream: str) -> None:
        """A stream has finished what it had been given; the memory returns to its pool at the next request."""
        for block in self._waiting:
            self._users[block].discard(stream)
            self._has_finished |= not self._users[block]

    def flush(self) -> None:
        """Wait for all streams and give everything back that is free in whole segments or pages."""
        for block in self._waiting:
            self._users[block].clear()
        self._recover_finished()
        super().flush()

    def _recover_finished(self) -> None:
        self._has_finished = False
        finished = [block for block in self._waiting if not self._users[block]]
        self._waiting = [block for block in self._waiting if self._users[block]]
        for block in finished:
            self.allocated += block.size
            self._recover(block)

    def _recover(self, block: Block) -> None:
        self._users.pop(block, None)
        self.active -= block.size
        super()._recover(block)


def simulated(events: Sequence[StreamEvent], settings: AllocatorSettings) -> dict[str, int]:
    """What the simulation says of events: peaks of bytes, flushes, and how many events there was memory for."""
    device = StreamAllocator(settings)
    ran = len(events)
    for index, (kind, identity, nbytes, stream) in enumerate(events):
        if kind == "free":
            device.free(identity)
        elif kind == "use":
            device.use(identity, stream)
        elif kind == "finish":
            device.finish(stream)
        elif not device.malloc(identity, nbytes, stream):
            ran = index
            break
    peaks = {name: getattr(device, f"peak_{name}") for name in ("requested", "allocated", "active", "reserved")}
    return {**peaks, "flushes": device.flushes, "events": ran}
