"""Judges every order in which streams may run what was launched on them, by torch's own sanitizer.

``torch.cuda._sanitizer`` is plain Python: vector clocks of streams, and for every address who wrote and read it last.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.cuda._sanitizer import EventHandler


class HappensBefore:
    """An observer of :class:`~lightning_mist.devices.HostOps`.

    Args:
        line: Bytes of a storage that are watched by themselves; all of it together without.

    Attributes:
        races: Two uses of a tensor, one of them a write, that nothing orders.
    """

    def __init__(self, line: int | None = None) -> None:
        self._line = line
        self.races: list[object] = []
        self._handler = EventHandler()
        self._streams: set[int] = set()
        self._known: set[int] = set()
        self._stream(0)

    def _stream(self, number: int) -> int:
        if number not in self._streams:
            self._streams.add(number)
            self._handler._handle_stream_creation(number)
        return number

    def launched(self, stream: int, reads: list[Tensor], writes: list[Tensor]) -> None:
        read, written = (
            {address for tensor in some for address in self._addresses(tensor)} for some in (reads, writes)
        )
        for address in (read | written) - self._known:
            self._known.add(address)
            self._handler._handle_memory_allocation(address)
        names = {address: [hex(address)] for address in read | written}
        self.races += self._handler._handle_kernel_launch(
            self._stream(stream), read - written, written, set(), "launched", names
        )

    def _addresses(self, tensor: Tensor) -> Iterable[int]:
        first = tensor.untyped_storage().data_ptr()
        if self._line is None:
            return (first,)
        given: Any = tensor
        tensor = given if isinstance(given, Tensor) else given._tensor()  # a stand-in for one
        size = tensor.element_size()
        low, high = tensor.storage_offset() * size, tensor.storage_offset() * size + tensor.numel() * size
        return range(first + low // self._line * self._line, first + max(high, low + 1), self._line)

    def recorded(self, event: int, stream: int) -> None:
        self._handler._handle_event_creation(event)
        self._handler._handle_event_record(event, self._stream(stream))

    def waited(self, event: int, stream: int | None) -> None:
        if stream is None:
            self._handler._handle_event_synchronization(event)
        else:
            self._handler._handle_event_wait(event, self._stream(stream))
