"""A user's batch as rows of tensors: cut, varied and told apart, alike for the planner and the runtime.

A batch is any nesting of mappings, lists, tuples, dataclasses and what torch's pytree registry knows. *Rows* run along
dimension 0 of its tensors and numpy arrays, and along lists that hold no tensors (text, ids) and are as long. What has
no rows (numbers, text, ``None``, 0-dimensional tensors) belongs to every row. Where it is not certain what a row is,
the batch has no rows and is used whole.
"""

import copy
import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import SUPPORTED_NODES

from lightning_mist.attributes import held, is_a

Batch = TypeVar("Batch")

_ROWLESS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype, np.generic)
_ARRAYS = (Tensor, np.ndarray)


def is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor has a shape, but less memory than its elements take; True on the meta device too."""
    return tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def substitute(parameter: nn.Parameter, data: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A parameter of other data with the attributes of the user's: code reads them (scales of packed weights)."""
    made = nn.Parameter(data, requires_grad=requires_grad)
    made.__dict__.update((name, value) for name, value in vars(parameter).items() if not name.startswith("_"))
    return made


@contextmanager
def gradients_aside(parameters: Iterable[Tensor]) -> Iterator[list[Tensor | None]]:
    """Inside, tensors have no gradients; afterwards those in the list that is given: those that they had."""
    every = list(parameters)
    kept = [parameter.grad for parameter in every]
    for parameter in every:
        parameter.grad = None
    try:
        yield kept
    finally:
        for parameter, gradient in zip(every, kept, strict=True):
            parameter.grad = gradient


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one block of memory with sizes and strides: neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _sizes(tensor: Tensor) -> Hashable:
    """All sizes that others may follow from: the shape, or shapes of rows of a nested one; of a sparse one, entries."""
    if tensor.is_nested:
        return tuple(tuple(row.shape) for row in tensor.unbind())
    return tuple(tensor.shape) if is_dense(tensor) else (*tensor.shape, tensor._nnz())


_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType)
"""What leads to all of a program and is no part of a batch."""


def batch_rows(batch: Any) -> int | None:
    """Number of rows of a batch.

    Returns:
        The common size of dimension 0 of all tensors; ``None`` if there is no tensor with a dimension, if sizes differ,
        if a member is of an unknown class or layout, or if a list is ambiguous (as many entries as rows, each holding
        tensors itself).
    """
    sizes = set()
    for leaf in leaves(batch):
        if is_a(leaf, _ARRAYS):
            if is_a(leaf, Tensor) and not is_dense(leaf):
                return None
            if leaf.ndim:
                sizes.add(int(leaf.shape[0]))
        elif not is_a(leaf, _ROWLESS):
            return None
    if len(sizes) != 1:
        return None
    rows = sizes.pop()
    return None if _ambiguous(batch, rows) else rows


def slice_rows(batch: Batch, first: int, end: int) -> Batch:
    """Rows ``first`` to ``end`` (exclusive) of a batch, in fresh containers; tensors are views.

    Raises:
        ValueError: If the batch has no rows, or not these.
    """
    rows = batch_rows(batch)
    if rows is None:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has no rows to cut: its tensors must share dimension 0"
        )
    if not 0 <= first <= end <= rows:
        raise ValueError(f"rows {first} to {end} of a batch of {rows} rows: they must lie within 0 and {rows}")

    def cut(node: Any) -> Any:
        if is_a(node, _ARRAYS):
            return node[first:end] if node.ndim else node
        return type(node)(node[first:end]) if is_row_list(node, rows) else None

    result: Batch = rebuild(batch, cut)
    return result


def sequence_length(batch: Any) -> int | None:
    """The length of the sequences: the second dimension that all matrices of integers share; ``None`` if none."""
    matrices = [t for t in batch_tensors(batch) if t.dim() == 2 and not t.is_floating_point() and not t.is_complex()]
    lengths = {tensor.shape[1] for tensor in matrices}
    return lengths.pop() if len(lengths) == 1 and min(lengths) > 1 else None


def token_places(batch: Any) -> tuple[tuple[int, int], ...]:
    """Which dimensions of which tensors :func:`slice_tokens` cuts, by places among them."""
    length, arrays = sequence_length(batch), [leaf for leaf in leaves(batch) if is_a(leaf, _ARRAYS)]
    return tuple(
        (index, dim)
        for index, leaf in enumerate(arrays)
        for dim, size in enumerate(leaf.shape)
        if dim and size == length
    )


def slice_tokens(batch: Batch, first: int, end: int) -> Batch:
    """Positions ``first`` to ``end`` (exclusive) of all dimensions after the first that are as long as the sequences.

    Tensors are as contiguous as a loader's. A batch without sequences stays as it is.
    """
    length = sequence_length(batch)

    def cut(node: Any) -> Any:
        if not is_a(node, _ARRAYS):
            return None
        places = (slice(first, end) if dim and size == length else slice(None) for dim, size in enumerate(node.shape))
        part = node[tuple(places)] if node.ndim else node
        return part.contiguous() if is_a(part, Tensor) else part

    result: Batch = rebuild(batch, cut)
    return result


def copy_batch(batch: Batch, *, with_tensors: bool = False) -> Batch:
    """The same batch in fresh containers of any class, so that a step may pop keys and run again; tensors are shared.

    Args:
        with_tensors: Whether tensors are copied too.

    Raises:
        Exception: Of any kind, by what cannot be copied: locks, open files, tensors that have a graph.
    """
    with _Copies(with_tensors):
        return copy.deepcopy(batch)


class _Copies(TorchFunctionMode):
    """What ``copy.deepcopy`` makes of tensors: torch itself copies few that are not dense ones of its own class."""

    def __init__(self, with_tensors: bool) -> None:
        super().__init__()
        self._with_tensors = with_tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or (self._with_tensors and type(args[0]) is Tensor and is_dense(args[0])):
            return func(*args, **(kwargs or {}))
        return _cloned(args[0]) if self._with_tensors else args[0]


def _cloned(tensor: Tensor) -> Tensor:
    if not tensor.is_leaf:
        raise RuntimeError("a tensor that has a graph")
    with torch._C.DisableTorchFunctionSubclass():
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if type(made) is not type(tensor):
            made = made.as_subclass(type(tensor))
            made.__dict__.update(copy.deepcopy(vars(tensor)))
    return made


def is_row_list(node: Any, rows: int) -> bool:
    """Whether a list or tuple holds one value without rows for each row."""
    return type(node) in (list, tuple) and len(node) == rows and not any(_holds_arrays(item) for item in node)


def _holds_arrays(node: Any) -> bool:
    return any(is_a(leaf, _ARRAYS) and leaf.ndim for leaf in leaves(node))


def _ambiguous(node: Any, rows: int) -> bool:
    """Whether some list may be either one container per row or a container of tensors that have rows."""
    if _keeps_whole(node):
        return True
    if type(node) in (list, tuple) and len(node) == rows:
        nested = [item for item in node if not is_a(item, _ARRAYS)]
        if nested and any(_holds_arrays(item) for item in nested):
            return True
    return any(_ambiguous(child, rows) for child in _children(node) or ())


def _children(node: Any) -> list[Any] | None:
    """Members of a container, or ``None`` if this is a leaf."""
    if is_a(node, Mapping):
        return list(node.values())
    if is_a(node, (list, tuple)):
        return list(node)
    if not is_a(node, type) and dataclasses.is_dataclass(type(node)):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    known = SUPPORTED_NODES.get(type(node))
    return None if known is None else list(known.flatten_fn(node)[0])


def _keeps_whole(node: Any) -> bool:
    """Whether a container may keep something for each row that is not cut: items of a queue, lists beside members."""
    if is_a(node, (Mapping, list, tuple)) or type(node) not in SUPPORTED_NODES:
        return False
    children, context = SUPPORTED_NODES[type(node)].flatten_fn(node)
    if is_a(node, deque):
        return any(not is_a(item, _ARRAYS) for item in children)
    beside = context if is_a(context, (list, tuple)) else [context]
    return is_a(context, list) or any(is_a(item, (list, tuple)) for item in beside)


def leaves(node: Any) -> Iterator[Any]:
    """The members of a batch that are no containers, in a fixed order."""
    children = _children(node)
    if children is None:
        yield node
        return
    for child in children:
        yield from leaves(child)


def batch_tensors(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in order: in mappings, sequences and dataclasses; others' insides are not seen."""
    return [leaf for leaf in leaves(batch) if is_a(leaf, Tensor)]


def rebuild(node: Any, replace: Callable[[Any], Any]) -> Any:
    """The same batch in fresh containers, where ``replace`` may give another value for any member (``None``: none)."""
    new = replace(node)
    if new is not None:
        return new
    children = _children(node)
    return node if children is None else _like(node, [rebuild(child, replace) for child in children])


def _like(node: Any, items: list[Any]) -> Any:
    """A container like another around other members.

    Not made anew where that can be: a constructor may want other things. ``copy.copy`` keeps what else an object of its
    own class knows (transformers' BatchEncoding).
    """
    made: Any
    if is_a(node, Mapping) and not is_a(node, MutableMapping):
        made = type(node)(dict(zip(node, items, strict=True)))
    elif is_a(node, tuple):
        try:
            made = tuple.__new__(type(node), items)
            getattr(made, "__dict__", {}).update(getattr(node, "__dict__", {}))
        except TypeError:  # torch.Size and what torch.max returns have constructors in C, which take a sequence
            made = type(node)(items)
    elif is_a(node, (MutableMapping, list)):
        made = copy.copy(node)
        for key, item in zip(node if is_a(node, Mapping) else range(len(items)), items, strict=True):
            made[key] = item
    elif dataclasses.is_dataclass(node):
        made = copy.copy(node)
        for field, item in zip(dataclasses.fields(node), items, strict=True):
            object.__setattr__(made, field.name, item)
    else:
        known = SUPPORTED_NODES[type(node)]
        made = known.unflatten_fn(items, known.flatten_fn(node)[1])
    return made


_DEPTH = 16
"""Nesting beyond which a container is told apart by its type only; guards against those that contain themselves."""


def batch_signature(value: Any) -> Hashable:
    """Shapes and dtypes of a batch's tensors, its structure, and the plain values that may steer a step.

    Integers, booleans and names of entries count with their values, since shapes may follow from them; a text counts
    unless it is one of a list (data); a float counts with its type only. An object that several refer to counts once.
    """
    return _signature(value, {}, depth=0, is_item=False)


def _signature(value: Any, seen: dict[int, Any], *, depth: int, is_item: bool) -> Hashable:
    if is_a(value, Tensor):
        return _sizes(value), value.dtype, value.device.type
    if value is None or is_a(value, (bool, int, torch.Size)) or (is_a(value, (str, bytes)) and not is_item):
        return type(value), value
    kind: Any = type(value)
    if is_a(value, (str, bytes, type, *_CODE)) or depth == _DEPTH or id(value) in seen:
        return kind  # type: ignore[no-any-return]
    if is_a(value, Mapping):
        return type(value), tuple(
            (str(k), _signature(v, seen, depth=depth + 1, is_item=False)) for k, v in value.items()
        )
    if is_a(value, Sequence):
        return type(value), tuple(_signature(item, seen, depth=depth + 1, is_item=True) for item in value)
    seen[id(value)] = value  # kept: no other has its number meanwhile
    return type(value), tuple((str(k), _signature(v, seen, depth=depth + 1, is_item=False)) for k, v in held(value))


_OPERATORS = (
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul",
)  # fmt: skip
_WRITING = frozenset((*(f"__i{name}__" for name in _OPERATORS), "__setitem__"))


def is_writing(name: str) -> bool:
    """Whether a function of torch of this name writes into its first argument."""
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def function_name(func: Any) -> str:
    """Name of a function of torch; that of the attribute where one is read."""
    name = getattr(func, "__name__", type(func).__name__)
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else str(name)


def call_without_dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch so that it drops nothing at random."""
    name, given = getattr(func, "__name__", ""), dict(kwargs)
    if "dropout" in name and args and isinstance(args[0], Tensor):
        return args[0]
    if name == "scaled_dot_product_attention":
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        given = {key: 0.0 if key == "dropout_p" else value for key, value in given.items()}
    elif name == "multi_head_attention_forward":
        given["training"] = False
    return func(*args, **given)
