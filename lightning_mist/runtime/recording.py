"""Measured seconds and bytes of a run."""

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.attributes import SharedPatch, replaced
from lightning_mist.devices import DeviceOps, MemoryUse, ops_of
from lightning_mist.leaves import plain_leaves
from lightning_mist.runtime.communication import Work
from lightning_mist.runtime.host_memory import is_host
from lightning_mist.schedule import Action
from lightning_mist.tensors import batch_tensors

# How long the actions of a rank take, computing told apart from waiting.
#
# Between actions the recorder only makes marks, events on the stream of computation, which say when the device came
# there. What lies between two marks is read when the step is over and the caller has waited for the device, so nothing
# in the step waits for a measurement.


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """How long something took.

    Attributes:
        action: What it was: an action of the rank's list, or the name of what is not in it.
        waited_seconds: The part of them in which the rank waited for other ranks.
    """

    action: Action | str
    seconds: float
    waited_seconds: float = 0.0


class ActionRecorder:
    """Measures what a rank does while ``is_on``; else it costs a look at that attribute per action."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._ops = ops_of(device)
        # What happened, where it began, where it ended, and the pairs of marks around each of its waits.
        self._found: list[tuple[Action | str, Any, Any, list[tuple[Any, Any]]]] = []

    def around(self, action: Action | str, run: Iterator[Work]) -> Iterator[Work]:
        """Run an action, and record how long it takes and for how much of that it waits for the works it yields."""
        if not self.is_on:
            yield from run
            return
        waits = []
        began = self._mark()
        for work in run:
            before = self._mark()
            yield work
            # A work may hold the tensor it moved; the next one may be long in coming.
            del work
            waits.append((before, self._mark()))
        self._found.append((action, began, self._mark(), waits))

    @contextmanager
    def phase(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """Record what happens inside, all of it as waiting for other ranks if it ``waits``."""
        if not self.is_on:
            yield
            return
        began = self._mark()
        yield
        ended = self._mark()
        self._found.append((name, began, ended, [(began, ended)] if waits else []))

    def take(self) -> tuple[Recorded, ...]:
        """What was recorded since the last time, in the order in which it ended.

        On a CUDA device everything recorded must have run by now.
        """
        found, self._found = self._found, []
        return tuple(
            Recorded(
                action=action,
                seconds=self._ops.seconds(began, ended),
                waited_seconds=sum(self._ops.seconds(*wait) for wait in waits),
            )
            for action, began, ended, waits in found
        )

    def _mark(self) -> Any:
        return self._ops.record(timed=True)


# Measured bytes and seconds of a real run, beside the predicted ones.
#
# On a device the caching allocator counts bytes, and events take the time. A CPU has neither; there storages are
# counted when operators get or give them: a dispatch mode sees forward and backward operators, recomputation under
# checkpointing, the optimizer's step, and buffers of collectives. It counts what a model of memory can count, the bytes
# of storages; what an operator allocates and frees inside itself it does not see, nor what other threads run.
#
# The mode costs some ten microseconds per operator: measure bytes and seconds in different steps.


class AllocatorMeter:
    """Bytes of a device's caching allocator; blocks are multiples of 512 bytes, and all tensors of it count.

    A meter counts while it is entered; it may be entered again and again, not within itself.

    Attributes:
        peak_bytes: Largest number of bytes alive meanwhile, since the last reset.
        reserved_bytes: The most that the allocator held meanwhile; ``None`` where there is none.
        device_bytes: What the device said was in use, by all programs, when it was left; ``None`` for host memory.
    """

    def __init__(self, ops: DeviceOps) -> None:
        self._ops = ops
        self.peak_bytes = self.reserved_bytes = self.device_bytes = 0

    @property
    def current_bytes(self) -> int:
        """Bytes alive."""
        return self._use().allocated

    def observe(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already: the allocator knows them."""

    def reset(self) -> None:
        """Forget the peak: from now on it is what is alive now."""
        self._ops.reset_peak()
        use = self._use()
        self.peak_bytes, self.reserved_bytes = use.allocated, use.reserved

    def __enter__(self) -> "AllocatorMeter":
        # The allocator has one peak, which may stem from before; earlier peaks of this meter are kept here.
        self._ops.reset_peak()
        return self

    def __exit__(self, *error: Any) -> None:
        use = self._use()
        self.peak_bytes = max(self.peak_bytes, use.peak_allocated)
        self.reserved_bytes = max(self.reserved_bytes, use.peak_reserved)
        self.device_bytes = use.used

    def _use(self) -> MemoryUse:
        use = self._ops.memory()
        assert use is not None
        return use


class _Alive(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows the address and the counted bytes of its storage."""

    __slots__ = ("address", "size")

    address: int
    size: int


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of CPU storages that operators touch, each storage once however many tensors view it.

    A storage leaves the count when it is freed, whoever held it. Its weak reference's callback only notes that, and the
    count follows at the next operator: callbacks come at any moment and in any thread.
    """

    reserved_bytes = device_bytes = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, _Alive] = {}
        self._freed: deque[_Alive] = deque()
        self._current = self.peak_bytes = 0

    @property
    def current_bytes(self) -> int:
        """Bytes alive."""
        self._settle()
        return self._current

    def observe(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already: parameters, gradients, optimizer state, the batch."""
        self._settle()
        for tensor in tensors:
            self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self._current)

    def reset(self) -> None:
        """Forget the peak: from now on it is what is alive now."""
        self.peak_bytes = self.current_bytes

    def __enter__(self) -> "StorageMeter":
        """Count from here on; compiled code runs eagerly: under a mode torch would never compile it again."""
        _run_eagerly.__enter__()
        _followed_resizing.__enter__()
        _inside().append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting; what is freed from here on is still noticed."""
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            _inside().remove(self)
            _followed_resizing.__exit__()
            _run_eagerly.__exit__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, then count the storages it got and gave."""
        result = func(*args, **(kwargs or {}))
        self._settle()
        for tensor in batch_tensors((args, kwargs, result)):
            self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self._current)
        return result

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._settle()
        self._count_storage(storage)
        self.peak_bytes = max(self.peak_bytes, self._current)

    def _settle(self) -> None:
        while self._freed:
            reference = self._freed.popleft()
            self._current -= reference.size
            # The address may have been given to another storage in the meantime.
            if self._alive.get(reference.address) is reference:
                del self._alive[reference.address]

    def _count(self, tensor: Tensor) -> None:
        for _, plain in plain_leaves(tensor):
            if plain.layout is torch.strided:
                self._count_storage(plain.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        # A fake tensor says it is on a CPU; its storage says it is not.
        if storage.device.type != "cpu" or is_host(storage):
            return
        address, size = storage._cdata, storage.nbytes()
        known = self._alive.get(address)
        if known is not None and known() is not None:
            self._current += size - known.size
            known.size = size
            return
        reference = _Alive(storage, self._freed.append)
        reference.address, reference.size = address, size
        self._alive[address] = reference
        self._current += size


_HERE = threading.local()


def _inside() -> list[StorageMeter]:
    """The meters that this thread is inside of."""
    meters: list[StorageMeter] = _HERE.__dict__.setdefault("meters", [])
    return meters


_run_eagerly = SharedPatch(lambda: torch.compiler.set_stance("force_eager"))
"""Inside, compiled code runs eagerly, in every thread: torch has one stance."""


@SharedPatch
@contextmanager
def _followed_resizing() -> Iterator[None]:
    """Inside, meters see storages that get another size.

    Sharding frees and reallocates storages in place, which no operator sees. A meter counts what its own thread does.
    """
    original = torch.UntypedStorage.resize_

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        for meter in _inside():
            meter._resized(storage)
        return result

    with replaced(torch.UntypedStorage, resize_=resize_and_count):
        yield


def meter_memory(device: torch.device, tensors: Iterable[Tensor] = ()) -> AllocatorMeter | StorageMeter:
    """The meter for a device: its allocator is asked, but on a CPU, which has none, storages are counted."""
    meter: AllocatorMeter | StorageMeter
    meter = StorageMeter() if device.type == "cpu" else AllocatorMeter(ops_of(device))
    meter.observe(tensors)
    return meter


def state_tensors(
    module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), batch: Any = None
) -> Iterator[Tensor]:
    """What is in memory between steps: parameters, their gradients, buffers, optimizer state; and the batch."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in optimizers:
        yield from batch_tensors(list(optimizer.state.values()))
    yield from batch_tensors(batch)
