"""Which linear operations a step runs on parameters: what a zero-bubble schedule may split and put off."""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_mist.model.operators import storage_key
from lightning_mist.model.saved import Ledger


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
        self._seen: set[tuple[int, int]] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function and count it if it is a linear operation on a parameter."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = _operands(func, args, kwargs)
        if operands is not None and id(operands[1]) in self._trained and isinstance(result, torch.Tensor):
            value, weight = operands
            self._ledger.note_linear(
                flops=2 * prod(weight.shape) * (value.numel() // max(1, value.shape[-1])),
                kept_bytes=result.numel() * result.element_size() + self._input_bytes(value),
            )
        return result

    def _input_bytes(self, value: torch.Tensor) -> int:
        """Bytes of an input, none if another linear operation of the same part keeps it already."""
        key = (self._ledger.part, storage_key(value))
        if key in self._seen:
            return 0
        self._seen.add(key)
        return value.numel() * value.element_size()


def _operands(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Input and weight of a linear operation."""
    if func is F.linear:
        found = (args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["weight"])
    elif func in (torch.addmm, torch.Tensor.addmm) and len(args) >= 3:
        found = (args[1], args[2])
    elif func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm) and len(args) >= 2:
        found = (args[0], args[1])
    else:
        return None
    return found if all(isinstance(item, torch.Tensor) for item in found) else None
