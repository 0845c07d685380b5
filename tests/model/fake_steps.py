"""Running a function on fake tensors and looking at what it keeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.device.operator_table import DeviceOperators
from lightning_mist.model.trace.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a function kept for backward besides its inputs and its result, and the most alive in either direction."""

    bytes: int
    result: Tensor
    forward_peak: int
    backward_peak: int
    flops: int


def fakes(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return tuple(torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def kept_by(table: DeviceOperators, function: Callable[..., Any], *inputs: Tensor, rounds: bool = True) -> Kept:
    """The result is not counted: its consumer is the one to keep it, or not."""
    ledger = Ledger(1)
    with table.installed(rounds=rounds), ledger:
        result = function(*inputs)
        storage = result.untyped_storage().nbytes()
        bytes_kept = ledger.live_bytes - storage
        gradient = torch.empty_like(result)
        ledger.enter(0, backward=True)
        result.backward(gradient)
    peak = max(ledger.backward[0].timeline) - storage - gradient.untyped_storage().nbytes()
    flops = ledger.forward[0].flops + ledger.backward[0].flops
    highest = max(ledger.forward[0].timeline)
    return Kept(bytes=bytes_kept, result=result, forward_peak=highest, backward_peak=peak, flops=flops)
