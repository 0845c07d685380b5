"""Which object stands for a device, and which devices are in use."""

import copyreg
from functools import cache
from typing import Any

import torch

from lightning_mist.devices.accelerator import AcceleratorOps
from lightning_mist.devices.host import HostOps
from lightning_mist.devices.ops import DeviceOps

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
