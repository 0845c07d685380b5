"""Which linear operations a step runs on parameters: what a zero-bubble schedule may split and put off."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_mist.model.trace.ledger import Ledger
from lightning_mist.model.trace.rank_step import part_of
from lightning_mist.tensor_parallel import SplitTensor


class LinearCounter(TorchFunctionMode):
    """Counts linear operations whose weight is a trained parameter, in the part of the step that runs them."""

    def __init__(self, ledger: Ledger, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._ledger = ledger
        self._trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self._kept: dict[tuple[int, int], weakref.ref[Any]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = _operands(func, args, kwargs)
        if operands is not None and id(part_of(operands[1])) in self._trained and isinstance(result, torch.Tensor):
            self._count(*operands, result.dtype)
        return result

    def _count(self, value: torch.Tensor, weight: torch.Tensor, input_dim: int, dtype: torch.dtype) -> None:
        """Of a split weight what this rank computes with its part, in the type of the result."""
        sizes = part_of(weight).shape
        vectors = value.numel() // max(1, value.shape[-1])
        itemsize = dtype.itemsize
        kept = vectors * sizes[1 - input_dim] * itemsize  # the gradient of the output
        # Else another linear operation keeps this input already; of what autocast casts each keeps a copy of its own.
        if value.dtype != dtype or self._is_new(part_of(value)):
            kept += vectors * sizes[input_dim] * itemsize
        self._ledger.note_linear(flops=2 * prod(sizes) * vectors, kept_bytes=kept)

    def _is_new(self, value: torch.Tensor) -> bool:
        storage = value.untyped_storage()
        key = (self._ledger.part, storage._cdata)
        if key in self._kept:
            return False
        # What is gone may leave its address to another.
        self._kept[key] = weakref.ref(storage, lambda _: self._kept.pop(key, None))
        return True


class WeightOperands(TorchFunctionMode):
    """Notes of what the gradients of weights are made: inputs of products with them, and gradients of these products.

    A zero-bubble schedule keeps both until it makes the gradients: of what autocast casts the copy. Which products it
    takes apart is the runtime's rule: those of an ordinary tensor with a parameter that is a matrix, of tensor-parallel
    ranks those of their parts.
    """

    def __init__(self, ledger: Ledger, names: Mapping[int, str], blocks: Sequence[str]) -> None:
        super().__init__()
        self._ledger, self._names, self._blocks = ledger, names, blocks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = _operands(func, args, kwargs) if torch.is_grad_enabled() else None
        if operands is not None and any(isinstance(item, SplitTensor) for item in (*args, *kwargs.values())):
            # A mode is off while it answers; the products of tensor-parallel parts are to be seen here too.
            with self:
                return SplitTensor.__torch_function__(func, types, args, kwargs)
        name = None if operands is None else self._names.get(id(operands[1]))
        if operands is None or name is None:
            return func(*args, **kwargs)
        part = self._ledger.part
        within = name.removeprefix(f"{self._blocks[part - 1]}.") if 0 < part <= len(self._blocks) else name
        with self._ledger.multiplying(operands[0], part, within):
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(partial(self._arrived, part, within))  # type: ignore[no-untyped-call]
        return result

    def _arrived(self, part: int, name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._ledger.note_weight(gradient, part, name)


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
