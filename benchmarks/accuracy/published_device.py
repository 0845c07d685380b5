"""A device that has only an allocator: code runs on meta tensors, and every allocation goes to a simulated device.

Programs that other people ran and measured are run again here, operator by operator, with the same order of
allocations on the same streams, but without data: tensors are on torch's meta device, which knows shapes only. A
dispatch mode sees every operator, takes memory for what it allocates from a simulation of torch's caching allocator,
and gives it back when the storage dies. So what is predicted is what
the program does, not what a formula says about it.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.accuracy.allocator_streams import StreamAllocator
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings


class OutOfDeviceMemoryError(RuntimeError):
    """The simulated device cannot serve a request."""


class SimulatedDevice(TorchDispatchMode):
    """Allocations of what runs while it is entered, on meta tensors.

    Args:
        settings: How the allocator is set up.
        workspaces: Bytes that the linear algebra library takes for a stream when it first multiplies there.

    Attributes:
        peak_allocated, peak_active, peak_reserved: Most bytes since the last :meth:`reset_peaks`.
        stream: Name of the stream that allocates now.
    """

    def __init__(self, settings: AllocatorSettings | None = None, workspaces: int = 0) -> None:
        """Nothing is allocated."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = StreamAllocator(settings or AllocatorSettings())
        self.stream = "compute"
        self.peak_allocated = self.peak_active = self.peak_reserved = 0
        self._workspaces, self._with_workspace = workspaces, set[str]()
        self._names = itertools.count()
        self._living: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._is_paused = False

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """What runs within allocates on another stream."""
        self.stream, before = stream, self.stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs within takes no memory: views into memory that is accounted for elsewhere."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def malloc(self, nbytes: int) -> int:
        """Take memory that no tensor stands for; returns its name for :meth:`free`."""
        name = next(self._names)
        if not self.allocator.malloc(name, nbytes, self.stream):
            raise OutOfDeviceMemoryError(
                f"{nbytes} bytes on stream {self.stream}: {self.allocator.allocated} are allocated, "
                f"{self.allocator.reserved} reserved"
            )
        self.peak_allocated = max(self.peak_allocated, self.allocator.allocated)
        self.peak_active = max(self.peak_active, self.allocator.active)
        self.peak_reserved = max(self.peak_reserved, self.allocator.reserved)
        return name

    def free(self, name: int) -> None:
        """Give memory back."""
        self.allocator.free(name)

    def temporary(self, *sizes: int) -> None:
        """Memory that an operator takes while it runs, beside its results."""
        for name in [self.malloc(size) for size in sizes]:
            self.free(name)

    def hold(self, tensor: Tensor) -> None:
        """Take memory for a tensor's storage, which had none, as by ``storage.resize_(size)``."""
        key = tensor.untyped_storage()._cdata
        if key in self._living:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has memory already")
        self._take(tensor)

    def drop(self, tensor: Tensor) -> None:
        """Give the memory of a tensor's storage back while the tensor lives on, as by ``storage.resize_(0)``."""
        key = tensor.untyped_storage()._cdata
        del self._watched[key]
        self.free(self._living.pop(key))

    def has_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage has memory."""
        return tensor.untyped_storage()._cdata in self._living

    def record_stream(self, tensor: Tensor, stream: str) -> None:
        """``tensor.record_stream``: its memory waits for what that stream was given before the tensor is freed."""
        name = self._living.get(tensor.untyped_storage()._cdata)
        if name is not None:
            self.allocator.use(name, stream)

    def synchronize(self, *streams: str) -> None:
        """Work given to these streams so far has ended."""
        for stream in streams:
            self.allocator.finish(stream)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        self.allocator.flush()

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self.peak_allocated, self.peak_active = self.allocator.allocated, self.allocator.active
        self.peak_reserved = self.allocator.reserved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and take memory for what it makes."""
        result = func(*args, **(kwargs or {}))
        if func.is_view or self._is_paused:
            return result
        if self._workspaces and self.stream not in self._with_workspace and func._schema.name in _MULTIPLIES:
            self._with_workspace.add(self.stream)
            self.malloc(self._workspaces)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "meta":
                self._note(leaf, args)
        extra = TEMPORARIES.get(func._schema.name)
        if extra is not None:
            self.temporary(*extra(*args))
        return result

    def _note(self, tensor: Tensor, args: tuple[Any, ...]) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._living:
            return
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == key:
                return  # Its memory is accounted for elsewhere.
        self._take(tensor)

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._living[key] = self.malloc(storage.nbytes())
        self._watched[key] = weakref.ref(storage, self._dropper(key, self._living[key]))

    def _dropper(self, key: int, name: int) -> Callable[[object], None]:
        def drop(_: object) -> None:
            if self._living.get(key) == name:
                self._watched.pop(key, None)
                self.free(self._living.pop(key))

        return drop


_MULTIPLIES = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))

TEMPORARIES: dict[str, Callable[..., tuple[int, ...]]] = {}
"""Bytes that operators take on CUDA beside their results, by name, from their arguments."""
