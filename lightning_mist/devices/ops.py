"""The protocol that everything which is not computing goes through, and how each kind of device does it.

Streams and events mean what they mean to torch: a stream runs what is launched on it in that order, and nothing else
orders two streams but an event recorded on one that the other waits for. Without a stream, the one that computes is
meant: torch's current stream on a device, the calling thread on a host.
"""

import copyreg
import itertools
import mmap
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
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


# A device with streams, by torch's device-neutral names; what has none yet is asked of the device's own module.


_HIGH_PRIORITY = -1


class AcceleratorOps:
    """See :class:`DeviceOps`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.synchronizations = 0
        self._module: Any = torch.get_device_module(device)

    def stream(self, *, high_priority: bool = False) -> Any:
        return torch.Stream(self.device, priority=_HIGH_PRIORITY if high_priority else 0)

    def launch(self, work: Callable[[], object], stream: Any = None, **uses: Sequence[Tensor]) -> None:
        if stream is None:
            work()
            return
        current = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(stream)
        try:
            work()
        finally:
            torch.accelerator.set_stream(current)

    def record(self, stream: Any = None, *, timed: bool = False) -> Any:
        event = torch.Event(self.device, enable_timing=timed)
        event.record(torch.accelerator.current_stream(self.device) if stream is None else stream)
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        (torch.accelerator.current_stream(self.device) if stream is None else stream).wait_event(event)

    def synchronize(self, event: Any = None) -> None:
        self.synchronizations += 1
        if event is None:
            torch.accelerator.synchronize(self.device)
        else:
            event.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def mapped_host_memory(self, nbytes: int) -> Tensor:
        if self.device.type != "cuda" or nbytes == 0:
            return self.host_memory(nbytes)
        found = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        address = found.data_ptr()
        self._module.check_error(int(self._module.cudart().cudaHostRegister(address, nbytes, 0)))
        # When the process ends there is nothing left to unlock, and the driver may be gone.
        weakref.finalize(found.untyped_storage(), self._unlock, address).atexit = False
        return found

    def _unlock(self, address: int) -> None:
        # Streams have waited for the copies, the host has not.
        torch.accelerator.synchronize(self.device)
        self._module.cudart().cudaHostUnregister(address)

    def memory(self) -> MemoryUse:
        free, total = self._module.mem_get_info(self.device)
        return MemoryUse(
            allocated=self._module.memory_allocated(self.device),
            peak_allocated=self._module.max_memory_allocated(self.device),
            reserved=self._module.memory_reserved(self.device),
            peak_reserved=self._module.max_memory_reserved(self.device),
            used=total - free,
            total=total,
        )

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def release_cached(self) -> None:
        self._module.empty_cache()

    def generator(self) -> torch.Generator:
        self._module.init()  # nothing if it has been; there are none before
        found: torch.Generator = self._module.default_generators[self.device.index or 0]
        return found


# A CPU as a device: operators have run when their call returns, and streams are threads.
#
# Work on a stream runs later than it is asked for, in order, as on a device.


class HostEvent:
    """A point in a stream's work, and when it happened, in seconds of ``time.perf_counter``."""

    __slots__ = ("_happened", "at")

    def __init__(self, *, is_ahead: bool) -> None:
        self.at = perf_counter()
        self._happened = threading.Event() if is_ahead else None

    def happen(self) -> None:
        """Note that the event has happened, and wake who waits for it."""
        self.at = perf_counter()
        if self._happened is not None:
            self._happened.set()

    def wait(self) -> None:
        """Wait until it has happened."""
        if self._happened is not None:
            self._happened.wait()


_Work = Callable[[], object]


class HostStream:
    """A thread that works off what it is given, in order, and ends when nobody can give it any more."""

    def __init__(self, number: int) -> None:
        self.errors: list[BaseException] = []
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work_off, args=(self._work, self.errors), name=f"stream {number}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._work.put, None)

    @property
    def works(self) -> bool:
        """Whether its thread is there: a copy of the process has none of its streams."""
        return self._thread.is_alive()

    def put(self, work: _Work) -> None:
        """Queue work behind all that the stream was given before."""
        self._work.put(work)


def _work_off(waiting: "queue.SimpleQueue[_Work | None]", errors: list[BaseException]) -> None:
    while (work := waiting.get()) is not None:
        try:
            work()
        except BaseException as error:
            # What comes behind it, events above all, still happens: somebody may wait for it.
            errors.append(error)
        # A thread that waits for more holds on to nothing.
        del work


class HostOps(DeviceOps):
    """Without an allocator that counts, and without a generator of its own."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.synchronizations = 0
        self._numbers = itertools.count(1)
        self._streams: weakref.WeakSet[HostStream] = weakref.WeakSet()

    def stream(self, *, high_priority: bool = False) -> HostStream:
        stream = HostStream(next(self._numbers))
        self._streams.add(stream)
        return stream

    def launch(self, work: _Work, stream: HostStream | None = None, **uses: Sequence[Tensor]) -> None:
        if stream is None:
            work()
        else:
            stream.put(work)

    def record(self, stream: HostStream | None = None, *, timed: bool = False) -> HostEvent:
        event = HostEvent(is_ahead=stream is not None)
        if stream is not None:
            stream.put(event.happen)
        return event

    def wait(self, event: HostEvent, stream: HostStream | None = None) -> None:
        if stream is None:
            event.wait()
            self._raise()
        else:
            stream.put(event.wait)

    def synchronize(self, event: HostEvent | None = None) -> None:
        """See :class:`DeviceOps`.

        Raises:
            BaseException: What work on a stream raised.
        """
        self.synchronizations += 1
        streams = [stream for stream in self._streams if stream.works]
        for last in [event] if event is not None else [self.record(stream) for stream in streams]:
            last.wait()
        self._raise()

    def _raise(self) -> None:
        for stream in self._streams:
            if stream.errors:
                error = stream.errors[0]
                stream.errors.clear()
                raise error

    def seconds(self, start: HostEvent, end: HostEvent) -> float:
        return end.at - start.at

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


# Which object stands for a device, and which devices are in use.


_KINDS_WITH_GENERATORS = ("cuda", "xpu")
"""Devices whose modules tell whether they are in use, and list their generators, which those of others (mps) do not."""


def used_generators() -> list[torch.Generator]:
    """The default generators of the devices that this process has begun to use: none, if it has used no device."""
    modules = [getattr(torch, kind, None) for kind in _KINDS_WITH_GENERATORS]
    used = [module for module in modules if module is not None and module.is_initialized()]
    return [generator for module in used for generator in module.default_generators]


@cache
def _ops_of(kind: str, index: int | None) -> DeviceOps:
    device = torch.device(kind) if index is None else torch.device(kind, index)
    return HostOps(device) if kind == "cpu" else AcceleratorOps(device)


def ops_of(device: torch.device) -> DeviceOps:
    """What a device can do; one and the same object for a device."""
    index = None if device.type == "cpu" else device.index
    if index is None and device.type != "cpu":
        index = torch.get_device_module(device).current_device()
    return _ops_of(device.type, index)


def _reduced(ops: Any) -> tuple[Any, ...]:
    # Streams and who observes them stay in their process.
    return ops_of, (ops.device,)


for _kind in (HostOps, AcceleratorOps):
    copyreg.pickle(_kind, _reduced)
