"""Reads of a tensor's values into Python, and what a run without values answers them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TRUTHS = frozenset(("__bool__", "is_nonzero", "equal", "allclose", "__contains__"))
_NUMBERS = frozenset(("item", "__float__", "__int__", "__index__", "__complex__"))

READS = _TRUTHS | _NUMBERS | {"tolist", "numpy", "__array__", "__format__", "nonzero", "argwhere"}
"""Functions that turn a tensor's values into Python values or sizes."""


@dataclass(frozen=True, slots=True)
class Read:
    """A value of a tensor that was read into Python.

    Attributes:
        function: The torch function, for example ``".item()"``.
        line: File and line of the user's code.
        region: Position of the block entered last.
        is_inner: Whether it happened inside that block.
        source: What the value depends on: ``"parameters"`` or ``"random numbers"``.
        value: What was read, where it is known.
    """

    function: str
    line: str
    region: int
    is_inner: bool
    source: str
    value: Any


def guess_read(name: str, args: tuple[Any, ...], tensor: Tensor, *, truth: bool, number: float) -> Any:
    """Something of the type that reading ``tensor`` by the function ``name`` gives.

    Args:
        name: The function.
        args: Its arguments.
        tensor: A tensor without values.
        truth: The answer to questions of truth.
        number: The answer where floating-point numbers are read; integers are 1.
    """
    value: Any = truth if tensor.dtype == torch.bool else 1
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        value = number
    full = torch.full(tensor.shape, value, dtype=tensor.dtype)
    if name in _TRUTHS:
        answer: Any = truth
    elif name in _NUMBERS:
        answer = {"item": type(value), "__float__": float, "__complex__": complex}.get(name, int)(value)
    elif name == "__format__":
        answer = format(value, args[1]) if tensor.ndim == 0 else "tensor"
    elif name in ("nonzero", "argwhere", "where"):
        everywhere = torch.ones(tensor.shape, dtype=torch.bool)
        answer = everywhere.nonzero(as_tuple=True) if name == "where" else everywhere.nonzero()
    else:
        answer = full.tolist() if name == "tolist" else full.numpy()
    return answer
