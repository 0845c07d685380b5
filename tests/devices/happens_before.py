"""Judges every order in which streams may run what was launched on them, by torch's own sanitizer.

``torch.cuda._sanitizer`` is plain Python: vector clocks of streams, and for every address who wrote and read it last.
"""

from torch import Tensor
from torch.cuda._sanitizer import EventHandler


class HappensBefore:
    """An observer of :class:`~lightning_mist.devices.HostOps`.

    Attributes:
        races: Two uses of a tensor, one of them a write, that nothing orders.
    """

    def __init__(self) -> None:
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
        read, written = ({tensor.untyped_storage().data_ptr() for tensor in some} for some in (reads, writes))
        for address in (read | written) - self._known:
            self._known.add(address)
            self._handler._handle_memory_allocation(address)
        names = {address: [hex(address)] for address in read | written}
        self.races += self._handler._handle_kernel_launch(
            self._stream(stream), read - written, written, set(), "launched", names
        )

    def recorded(self, event: int, stream: int) -> None:
        self._handler._handle_event_creation(event)
        self._handler._handle_event_record(event, self._stream(stream))

    def waited(self, event: int, stream: int | None) -> None:
        if stream is None:
            self._handler._handle_event_synchronization(event)
        else:
            self._handler._handle_event_wait(event, self._stream(stream))
