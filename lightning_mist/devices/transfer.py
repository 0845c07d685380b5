"""Many tensors as one, to travel in one message or copy."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mist.devices.ops import DeviceOps, ops_of


def packed(tensors: Sequence[Tensor], device: torch.device, nbytes: int | None = None) -> Tensor:
    """The bytes of tensors one after the other, of any types.

    Args:
        nbytes: How long the result is, if not as long as they are; what is left over is undefined.
    """
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    result = torch.empty(sum(map(len, parts)) if nbytes is None else nbytes, dtype=torch.uint8, device=device)
    start = 0
    for part in parts:
        result[start : start + len(part)] = part
        start += len(part)
    return result


def unpacked(buffer: Tensor, kinds: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Tensors of given shapes and types from what :func:`packed` gave, with memory of their own."""
    values, start = [], 0
    for shape, dtype in kinds:
        size = dtype.itemsize * prod(shape)
        # A clone starts at an aligned address, which a view into the buffer need not.
        values.append(buffer[start : start + size].clone().view(dtype).reshape(shape))
        start += size
    return values


class Homeward:
    """Brings values from a device home, behind what made them and not behind what was launched since."""

    def __init__(self, ops: DeviceOps) -> None:
        self._ops, self._stream = ops, ops.stream(high_priority=True)
        self._made: Any = None

    def made(self) -> None:
        """All values to bring home have been launched so far."""
        self._made = self._ops.record()

    def bring(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """Copies of what is on the device, by the ``id`` of the original: one copy and one wait for them all.

        Left out is what is elsewhere, and what has no bytes of its own (nested tensors, conjugate views).
        """
        here = [item for item in tensors if item.device == self._ops.device and _has_bytes(item)]
        made, self._made = self._made, None
        if not here:
            return {}
        home = self._ops.host_memory(sum(item.numel() * item.element_size() for item in here))
        self._ops.wait(self._ops.record() if made is None else made, self._stream)
        self._ops.launch(
            lambda: home.copy_(packed(here, self._ops.device), non_blocking=True),
            self._stream,
            reads=here,
            writes=[home],
        )
        self._ops.synchronize(self._ops.record(self._stream))
        copies = unpacked(home, [(tuple(item.shape), item.dtype) for item in here])
        return {id(item): copy for item, copy in zip(here, copies, strict=True)}


def read(tensor: Tensor) -> Any:
    """The numbers of a tensor, as lists; counts as waiting for its device."""
    ops_of(tensor.device).synchronizations += 1
    return tensor.tolist()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of host memory on a device, without waiting for what the device has to do before."""
    # Of memory that is not page-locked torch makes a copy of its own before it returns.
    return tensor.to(device, non_blocking=True)


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
