"""Copies that hold nothing, as on a device: what is freed while it is on its way is an error."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_mist.runtime.host_memory import CopyStreams


class _Weak:
    """Stands in for a tensor whose memory somebody else must keep."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def untyped_storage(self) -> torch.UntypedStorage:
        storage = self._storage()
        if storage is None:
            raise RuntimeError("a tensor was freed while it was copied")
        return storage

    def copy_(self, source: "_Weak", *, non_blocking: bool) -> None:
        self._tensor().copy_(source._tensor(), non_blocking=non_blocking)

    def _tensor(self) -> Tensor:
        return torch.empty(0, dtype=self._dtype).set_(self.untyped_storage(), *self._form)


@contextmanager
def weak_copies() -> Iterator[None]:
    """Inside, streams hold no tensors."""
    original = CopyStreams._copy

    def copy(streams: CopyStreams, stream: Any, targets: Any, sources: Any, after: Any) -> Any:
        return original(streams, stream, [_Weak(t) for t in targets], [_Weak(s) for s in sources], after)  # type: ignore[misc]

    with mock.patch.object(CopyStreams, "_copy", copy):
        yield
