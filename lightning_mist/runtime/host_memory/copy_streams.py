"""Copies between the device and host memory: one stream for each direction, and where copies land on the device.

A stream never waits for the caller, and the caller never for a stream, but by events: whoever uses what a copy writes,
or writes or frees what it reads, has waited for the event that the copy gave. So no allocator has to be told of
streams.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_mist.devices import DeviceOps
from lightning_mist.runtime.host_memory.host_pool import let_go, padded_bytes, views_into
from lightning_mist.schedule.offload_actions import NUM_BUFFERS


class CopyStreams:
    """The two copy streams of a device."""

    def __init__(self, ops: DeviceOps) -> None:
        self.ops = ops
        self.loaded_bytes = self.stored_bytes = 0

    @cached_property
    def _load(self) -> Any:
        return self.ops.stream()

    @cached_property
    def _store(self) -> Any:
        return self.ops.stream()

    def load(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Iterable[Any] = ()) -> Any:
        """Copy from host memory to the device.

        Args:
            after: Events to wait for before; None among them is nothing.

        Returns:
            The event of the copies' end.
        """
        self.loaded_bytes += _bytes(sources)
        return self._copy(self._load, targets, sources, after)

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Copy from the device to host memory, behind what has been computed so far; otherwise as :meth:`load`."""
        self.stored_bytes += _bytes(sources)
        return self._copy(self._store, targets, sources, [self.ops.record()])

    def wait(self, event: Any) -> None:
        """Let what is computed from here on wait for a copy."""
        if event is not None:
            self.ops.wait(event)

    def uses(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """What is computed now uses these tensors; said for those who watch the order of things."""
        self.ops.launch(_nothing, reads=reads, writes=writes)

    def settle(self) -> None:
        """Wait, as the caller, until all copies to the host have ended."""
        self.ops.synchronize(self.ops.record(self._store))

    def _copy(self, stream: Any, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Iterable[Any]) -> Any:
        for event in after:
            if event is not None:
                self.ops.wait(event, stream)

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
                let_go(target, source)

        self.ops.launch(copy, stream, reads=sources, writes=targets)
        return self.ops.record(stream)


def _nothing() -> None:
    pass


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class DeviceBuffers:
    """The buffers of one kind of state."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, 0
        self._buffers: list[Tensor] = []

    def ensure(self, units: Sequence[Sequence[Tensor]]) -> bool:
        """Make larger buffers if some unit fits into none, when nothing is in them; whether they are new."""
        size = max(map(padded_bytes, units), default=0)
        if size <= self._size:
            return False
        self._buffers.clear()
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)]
        self._size = size
        return True

    def views(self, index: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Views into a buffer, like the tensors that are to come there."""
        return views_into(self._buffers[index % NUM_BUFFERS], like)
