"""Linear layers as they are called: ``linear``, ``addmm`` and ``matmul`` with a parameter, whatever module does it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_ADDMMS = (torch.addmm, Tensor.addmm)


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One product with a matrix of parameters."""

    input: Tensor
    weight: Tensor  # the parameter; ``rows`` may be part of it
    bias: Tensor | None  # what is added, if the call itself adds it
    output_dim: int  # the dimension of the parameter along which outputs lie
    first_row: int  # the first of its entries along that dimension that takes part
    rows: int  # how many do

    @property
    def input_dim(self) -> int:
        """The dimension of the parameter along which inputs lie."""
        return 1 - self.output_dim

    @property
    def width(self) -> int:
        """Number of inputs."""
        return self.weight.shape[self.input_dim]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return (*self.input.shape[:-1], self.rows)


def read_linear(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Mapping[int, Tensor]
) -> LinearCall | None:
    """A call of a torch function as a linear layer on one of the parameters by ``id``, None if it is none."""
    if func is functional.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
        return _matched(given["input"], given["weight"], given.get("bias"), 0, parameters)
    if func in _ADDMMS and len(args) == 3 and not kwargs:
        return _matched(args[1], args[2], args[0], 1, parameters)
    if func in _MATMULS and len(args) == 2 and not kwargs:
        return _matched(args[0], args[1], None, 1, parameters)
    return None


def _matched(
    given: Any, weight: Any, bias: Any, output_dim: int, parameters: Mapping[int, Tensor]
) -> LinearCall | None:
    if not isinstance(weight, Tensor) or not isinstance(given, Tensor) or weight.dim() != 2 or not given.dim():
        return None
    base, first = weight, 0
    if id(weight) not in parameters:
        if weight._base is None or id(weight._base) not in parameters or weight._base.dim() != 2:
            return None
        base = weight._base
        upright = weight if weight.stride() == base.stride() else weight.t()
        if upright.stride() != base.stride() or upright.shape[1] != base.shape[1] or not base.stride(0):
            return None
        output_dim = output_dim if upright is weight else 1 - output_dim
        first = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
        if output_dim != 0 and upright.shape != base.shape:
            return None
        rows = upright.shape[output_dim]
    else:
        rows = weight.shape[output_dim]
    call = LinearCall(given, base, bias if isinstance(bias, Tensor) else None, output_dim, first, rows)
    return call if given.shape[-1] == call.width else None


class LinearMode(TorchFunctionMode):
    """Inside, products with parameters are answered by :meth:`answer`, those inside of multi-head attention too."""

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.parameters = parameters

    def answer(self, call: LinearCall, compute: Callable[[], Any]) -> Any:
        """What the product shall be; ``compute`` calculates it."""
        return compute()

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Any other call."""
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return seen_through(func)(*args, **given)
        call = read_linear(func, args, given, self.parameters)
        if call is None:
            return self.other(func, args, given)
        return self.answer(call, lambda: func(*args, **given))


def seen_through(func: Any) -> FunctionType:
    """A function of torch written in Python, without its first lines that hand the whole call to an observer."""
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    opened = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
