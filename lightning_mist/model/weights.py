"""Which linear operations a step runs on parameters: what a zero-bubble schedule may split and put off."""

import weakref
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_mist.model.saved import Ledger
from lightning_mist.model.split_step import part_of


class LinearCounter(TorchFunctionMode):
    """Counts linear operations whose weight is a trained parameter, in the part of the step that runs them.

    Args:
        ledger: Knows the part; gets the counts.
        parameters: The parameters.
    """

    def __init__(self, ledger: Ledger, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._ledger = ledger
        self._trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self._kept: dict[tuple[int, int], weakref.ref[Any]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function and count it if it is a linear operation on a parameter."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = _operands(func, args, kwargs)
        if operands is not None and id(part_of(operands[1])) in self._trained and isinstance(result, torch.Tensor):
            self._count(*operands)
        return result

    def _count(self, value: torch.Tensor, weight: torch.Tensor, input_dim: int) -> None:
        """Of a split weight what this rank computes with its part."""
        sizes = part_of(weight).shape
        vectors = value.numel() // max(1, value.shape[-1])
        itemsize = value.element_size()
        kept = vectors * sizes[1 - input_dim] * itemsize  # the gradient of the output
        if self._is_new(part_of(value)):  # else another linear operation keeps this input already
            kept += vectors * sizes[input_dim] * itemsize
        self._ledger.note_linear(flops=2 * prod(sizes) * vectors, kept_bytes=kept)

    def _is_new(self, value: torch.Tensor) -> bool:
        """Whether no linear operation of this part had this input before."""
        storage = value.untyped_storage()
        key = (self._ledger.part, storage._cdata)
        if key in self._kept:
            return False
        # What is gone may leave its address to another.
        self._kept[key] = weakref.ref(storage, lambda _: self._kept.pop(key, None))
        return True


def _operands(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """Input and weight of a linear operation, and the dimension of the weight that meets the input."""
    if func is F.linear:
        value, weight, dim = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["weight"], 1
    elif func in (torch.addmm, torch.Tensor.addmm) and len(args) >= 3:
        value, weight, dim = args[1], args[2], 0
    elif func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm) and len(args) >= 2:
        value, weight, dim = args[0], args[1], 0
    else:
        return None
    found = isinstance(value, torch.Tensor) and isinstance(weight, torch.Tensor) and weight.dim() == 2
    return (value, weight, dim) if found else None
