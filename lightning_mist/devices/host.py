"""A CPU as a device: operators have run when their call returns, and streams are threads.

Work on a stream runs later than it is asked for, in order, as on a device.
"""

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from lightning_mist.devices.ops import DeviceOps


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
