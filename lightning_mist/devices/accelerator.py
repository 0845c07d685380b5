"""A device with streams, by torch's device-neutral names; what has none yet is asked of the device's own module."""

import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mist.devices.ops import MemoryUse

_HIGH_PRIORITY = -1


class AcceleratorOps:
    """See :class:`~lightning_mist.devices.ops.DeviceOps`."""

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
