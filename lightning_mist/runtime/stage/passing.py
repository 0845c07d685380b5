"""What a stage takes from the one before it, and what it hands on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A tensor that a stage will receive.

    Attributes:
        shape: Its shape for this call.
        dtype: Its element type.
        device: Where it must be.
        requires_grad: Whether a gradient must be sent back.
        length: Size of the whole tensor along the dimension of the sequence; 1 if it has none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    length: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage's forward gave.

    Attributes:
        tensors: The tensors to send, in the order of the map's cut, attached to the graph; empty on the last stage.
        lengths: For each of them the size of the whole tensor along the dimension of the sequence; 1 if it has none.
        value: What the user's step returned, on the last stage.
    """

    tensors: tuple[Tensor, ...]
    value: Any
    lengths: tuple[int, ...] = ()
