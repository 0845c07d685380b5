"""Large matrices as products of two thin ones, so that a check with numbers takes no memory for weights.

What a module computes is the same whether a matrix is of low rank or not, and so is whether it can be shared out: a
rank's part of ``left @ right.mT`` is the product with a part of one of them. All entries differ, so that a part in the
wrong place shows; a product with the matrix is one with either factor after the other, and nothing of the matrix's size
is ever made. Gradients of the factors are those of the matrix times a few random vectors, which tells gradients apart.
A block of a 175B model takes megabytes in place of 36.8 GiB.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_mist.errors import TraceError
from lightning_mist.model.operator_costs import seen_through
from lightning_mist.tensor_parallel import SplitTensor, TensorGroup, copy_in
from lightning_mist.tensors import function_name
from lightning_mist.units import format_bytes

MOST_BYTES = 3 * 2**30
"""What the numbers of one check may take, whatever the memory of the host: with torch itself it stays within 4 GiB."""

_RANK = 16  # of the products: few, and more than the chance that two random vectors are alike would need
LARGE = 2**20  # matrices with more entries are factored; those of smaller layers are cheap as they are


def is_factored(parameter: Tensor) -> bool:
    """Whether a check holds a parameter as factors."""
    return parameter.dim() >= 2 and parameter.numel() > LARGE and parameter.is_floating_point()


class FactoredRoom:
    """Bytes that factored matrices may take together where a rank needs them multiplied out."""

    def __init__(self, limit: int = MOST_BYTES) -> None:
        self.left = limit

    def take(self, matrix: "Factored", use: str) -> None:
        """Account for one matrix, its gradient, and a result and gradient of its size."""
        needed = 4 * matrix.numel() * matrix.element_size()
        self.left -= needed
        if self.left < 0:
            raise TraceError(
                f"{use} needs a matrix of shape {tuple(matrix.shape)} otherwise than in a product: trying that takes "
                f"{format_bytes(needed)}, and a check may take {format_bytes(MOST_BYTES)} for all ranks together"
            )


class Factored(Tensor):
    """A matrix, or a batch of them, ``left @ right.mT``."""

    left: Tensor
    right: Tensor
    room: FactoredRoom

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor, room: FactoredRoom) -> "Factored":
        """A product that shows its shape; gradients arrive in its factors."""
        sizes = (*left.shape[:-1], right.shape[-2])
        needs = left.requires_grad or right.requires_grad
        made: Factored = Tensor._make_wrapper_subclass(
            cls, sizes, dtype=left.dtype, device=left.device, requires_grad=needs
        )
        made.left, made.right, made.room = left, right, room
        made._is_param = True  # isinstance(made, nn.Parameter) holds, as modules expect
        return made

    @classmethod
    def random(cls, parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> "Factored":
        """One of a parameter's shape, with entries of common size."""
        *batch, rows, columns = parameter.shape
        left = torch.randn(*batch, rows, _RANK, generator=generator).to(dtype) * _RANK**-0.5
        right = torch.randn(*batch, columns, _RANK, generator=generator).to(dtype) * columns**-0.5
        return cls(left, right, FactoredRoom())

    def copied_in(self, group: TensorGroup) -> "Factored":
        """See :func:`~lightning_mist.tensor_parallel.copy_in`."""
        return self._with(copy_in(self.left, group), copy_in(self.right, group))

    def plain(self, use: str = "a collective") -> Tensor:
        """The matrix itself."""
        self.room.take(self, use)
        return self.left @ self.right.mT

    def _with(self, left: Tensor, right: Tensor) -> "Factored":
        return Factored(left, right, self.room)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, SplitTensor) for kind in types):
            return NotImplemented  # their rules come first: they compute with parts, which may be factored
        name = function_name(func)
        if func is F.multi_head_attention_forward:
            return seen_through(func)(*args, **kwargs)
        is_property = getattr(func, "__name__", "") == "__get__"
        if name not in _TRANSPOSES if is_property else name in _SEEN:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        found = _RULES.get(name)
        result = NotImplemented if found is None else found(func, args, kwargs)
        if result is not NotImplemented:
            return result
        args, kwargs = tree_map_only(Factored, lambda matrix: matrix.plain(name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TraceError(f"{func}: a weight of the check reached code below torch's Python functions")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Factored({tuple(self.shape)})"


_Rule = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]

_TRANSPOSES = ("T", "mT", "t")
_SEEN = ("size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "__len__", "__hash__")


def _linear(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, weight = given["input"], given["weight"]
    if isinstance(x, Factored) or not isinstance(weight, Factored) or weight.dim() != 2:
        return NotImplemented
    return F.linear(F.linear(x, weight.right.mT), weight.left, given.get("bias"))


def _matmul(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    first, second = (*args, *kwargs.values())
    if func == Tensor.__rmatmul__:
        first, second = second, first
    if isinstance(second, Factored):
        return NotImplemented if isinstance(first, Factored) else (first @ second.left) @ second.right.mT
    return first.left @ (first.right.mT @ second)


def _addmm(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs or len(args) != 3 or not isinstance(args[2], Factored) or isinstance(args[1], Factored):
        return NotImplemented
    added, first, second = args
    return func(added, first @ second.left, second.right.mT)


def _embedding(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Rows looked up; options that change the table or its gradient otherwise are for the matrix itself."""
    given = dict(zip(("input", "weight", "padding_idx", "max_norm"), args, strict=False)) | dict(kwargs)
    table, known = given.get("weight"), ("input", "weight", "padding_idx")
    if any(value for name, value in given.items() if name not in (*known, "norm_type")) or len(args) > 4:
        return NotImplemented
    if not isinstance(table, Factored) or table.dim() != 2:
        return NotImplemented
    return F.embedding(given["input"], table.left, given.get("padding_idx")) @ table.right.mT


def _swapped(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The matrix with rows for columns."""
    matrix, rest = args[0], (*args[1:], *kwargs.values())
    order = list(range(matrix.dim()))
    if len(rest) == 2 and getattr(func, "__name__", "") != "permute":
        first, second = (dim % len(order) for dim in rest)
        order[first], order[second] = second, first
    elif rest:
        order = [dim % len(order) for dim in (rest[0] if len(rest) == 1 else rest)]
    else:
        order[-2:] = reversed(order[-2:])
    if order == list(range(len(order))):
        return matrix
    if order[:-2] != list(range(len(order) - 2)):
        return NotImplemented
    return matrix._with(matrix.right, matrix.left)


def _both(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What keeps every value and changes types, memory or gradients at most."""
    matrix, rest = args[0], args[1:]
    if not isinstance(matrix, Factored) or any(isinstance(item, Factored) for item in rest):
        return NotImplemented
    return matrix._with(func(matrix.left, *rest, **kwargs), func(matrix.right, *rest, **kwargs))


def _getitem(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Some rows or columns, or matrices of a batch."""
    matrix, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    batch = matrix.dim() - 2
    if len(items) > matrix.dim() or not all(isinstance(item, (int, slice)) for item in items):
        return NotImplemented
    if not all(isinstance(item, slice) for item in items[batch:]):
        return NotImplemented
    rows, columns = (*items[batch:], slice(None), slice(None))[:2]
    own = (*items[:batch], *(slice(None),) * (batch - len(items[:batch])))
    at_left, at_right = (*own, rows), (*own, columns)
    return matrix._with(matrix.left[at_left], matrix.right[at_right])


_RULES: dict[str, _Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    "embedding": _embedding,
    "__getitem__": _getitem,
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"), _matmul),
    **dict.fromkeys((*_TRANSPOSES, "transpose", "swapaxes", "swapdims", "permute"), _swapped),
    **dict.fromkeys(("to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach"), _both),
}
