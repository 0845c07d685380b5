"""Many tensors as one, to travel in one message or copy."""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor


def packed(tensors: Sequence[Tensor], device: torch.device, nbytes: int | None = None) -> Tensor:
    """The bytes of tensors one after the other, of any types.

    Args:
        tensors: The tensors, on the device.
        device: Where they are.
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


def in_host_memory(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies of the tensors that are on a device, by the ``id`` of the original; one copy and one wait for each device.

    Tensors that are in host memory are left out, and those that have no bytes of their own (nested, conjugate views).
    """
    found: dict[int, Tensor] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "cpu"):
        here = [item for item in tensors if item.device == device and _has_bytes(item)]
        copies = unpacked(packed(here, device).cpu(), [(tuple(item.shape), item.dtype) for item in here])
        found |= {id(item): copy for item, copy in zip(here, copies, strict=True)}
    return found


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
