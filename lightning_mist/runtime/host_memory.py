"""Pinned host memory, the streams that copy to and from it, and where copies land on the device."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_mist.devices import DeviceOps
from lightning_mist.errors import PlanError
from lightning_mist.schedule.stage_program import NUM_BUFFERS
from lightning_mist.units import format_bytes

# Host memory for what is offloaded: mapped and page-locked once, in just the bytes asked for, within a budget.
#
# ``pin_memory`` of torch rounds sizes up to powers of two, so half as much again is taken on average. Here every unit
# has a mapping of its own, of its very size, for as long as the pool lives.


ALIGNMENT_BYTES = 64
"""Where a tensor begins in a mapping or in a buffer: a cache line, and what kernels with vector loads ask for."""


def padded(nbytes: int) -> int:
    """Bytes with what is left free up to where the next tensor may begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def views_into(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive aligned views into bytes, of the shapes and types of others, and of their strides where dense."""
    views, start = [], 0
    for tensor in like:
        nbytes = tensor.numel() * tensor.element_size()
        form = torch.empty_like(tensor, device="meta")
        views.append(buffer[start : start + nbytes].view(tensor.dtype).as_strided(form.shape, form.stride()))
        start += padded(nbytes)
    return views


def padded_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that :func:`views_into` needs."""
    return sum(padded(tensor.numel() * tensor.element_size()) for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Where a rank may keep what it moves.

    Attributes:
        budget: Bytes of host memory; any number if None.
        directory: Folder whose files hold parameters and optimizer state in place of host memory.
    """

    budget: int | None = None
    directory: Path | None = None


class HostPool:
    """A rank's host memory for what it moves.

    Args:
        budget: Bytes of memory that it may take; any number without.
        directory: If given, what it has is in files there, mapped into memory; only for a CPU.
    """

    def __init__(self, ops: DeviceOps, budget: int | None = None, directory: Path | None = None) -> None:
        self._ops, self._budget, self._directory, self.nbytes = ops, budget, directory, 0

    def take(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for tensors, of the same forms, within the budget; it stays theirs."""
        # Whoever counts what is made here would count it as the device's, on a CPU.
        with _disable_current_modes():
            return views_into(self.take_bytes(padded_bytes(like)), like)

    def take_bytes(self, nbytes: int) -> Tensor:
        """Take bytes of host memory out of the budget, for good unless they are given back.

        Raises:
            PlanError: If that is more than the budget.
        """
        if self._directory is None and self._budget is not None and self.nbytes + nbytes > self._budget:
            raise PlanError(
                f"offloading needs {format_bytes(self.nbytes + nbytes)} of host memory or more, and "
                f"{format_bytes(self._budget)} may be used by each process: raise host_memory_limit, or offload less"
            )
        self.nbytes += nbytes
        with _disable_current_modes():
            if self._directory is None:
                memory = self._ops.mapped_host_memory(nbytes)
            else:
                memory = _in_a_file(nbytes, self._directory)
            memory.untyped_storage()._mist_is_host = True  # type: ignore[attr-defined]
        return memory

    def give(self, memory: Tensor) -> None:
        """Take back what :meth:`take_bytes` gave, and nobody uses any more."""
        self.nbytes -= len(memory)


def _in_a_file(nbytes: int, directory: Path) -> Tensor:
    """Bytes of a file that has no name and is gone with them."""
    size = max(nbytes, 1)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            mapping = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise PlanError(
            f"offload_directory={str(directory)!r}: no file of {format_bytes(size)} can be made there: {error}; name a "
            "folder of a disk with room for it"
        ) from error
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=size)[:nbytes]
    memory.untyped_storage()._mist_mapping = mapping  # type: ignore[attr-defined]
    return memory


def let_go(*tensors: Tensor) -> None:
    """Of tensors in files take the pages out of memory: what was written is the file's."""
    for mapping in {
        id(found): found
        for tensor in tensors
        if (found := getattr(tensor.untyped_storage(), "_mist_mapping", None)) is not None
    }.values():
        mapping.madvise(mmap.MADV_DONTNEED)


def is_host(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is of a pool: on a CPU that is also where everything else is."""
    return getattr(storage, "_mist_is_host", False)


# Copies between the device and host memory: one stream for each direction, and where copies land on the device.
#
# A stream never waits for the caller, and the caller never for a stream, but by events: whoever uses what a copy
# writes, or writes or frees what it reads, has waited for the event that the copy gave. So no allocator has to be told
# of streams.


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

    @property
    def half(self) -> int:
        """Bytes of half a buffer."""
        return self._size // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def views(self, index: int, like: Sequence[Tensor], half: int | None = None) -> list[Tensor]:
        """Views into a buffer, or into its first or second half, like the tensors that are to come there."""
        buffer = self._buffers[index % NUM_BUFFERS]
        return views_into(buffer if half is None else buffer[half * self.half :], like)
