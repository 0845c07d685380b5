"""Rules for what only moves elements: views, cuts, joins, repetitions."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mist.tensor_parallel.parts import bind, operand
from lightning_mist.tensor_parallel.shard_layout import (
    Layout,
    complete_index,
    index,
    infer_sizes,
    insert,
    outer_of,
    permute,
    remove,
    slice_shared,
    view,
)
from lightning_mist.tensor_parallel.tensor import RULES, SplitContext, SplitTensor, rule, whole, wrap


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """A list of sizes or dimensions given as one sequence, as several numbers, or by name."""
    for name in names:
        if name in kwargs:
            value = kwargs[name]
            return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else tuple(args)


def _viewed(context: SplitContext, tensor: SplitTensor, sizes: tuple[int, ...]) -> Any:
    layout = view(tensor.placement, sizes, context.degree)
    if layout is None:
        return NotImplemented
    return wrap(tensor.local.reshape(layout.local_sizes(context.degree)), layout, context)


@rule("view", "reshape", "view_as", "reshape_as")
def _reshape(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, rest = args[0], args[1:]
    if not isinstance(tensor, SplitTensor):
        return tensor.reshape(rest[0].shape)
    if rest and isinstance(rest[0], Tensor):
        rest = (tuple(rest[0].shape),)
    sizes = _sizes(rest, kwargs, "shape", "size", "other")
    if any(not isinstance(size, int) for size in sizes):
        return NotImplemented
    return _viewed(context, tensor, infer_sizes(prod(tensor.placement.sizes), sizes))


@rule("flatten")
def _flatten(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "start_dim", "end_dim"), args, kwargs, start_dim=0, end_dim=-1)
    sizes = args[0].placement.sizes
    start, end = given["start_dim"] % len(sizes), given["end_dim"] % len(sizes)
    return _viewed(context, args[0], (*sizes[:start], prod(sizes[start : end + 1]), *sizes[end + 1 :]))


@rule("unflatten")
def _unflatten(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "dim", "sizes"), args, kwargs)
    sizes = args[0].placement.sizes
    dim = given["dim"] % len(sizes)
    new = infer_sizes(sizes[dim], tuple(given["sizes"]))
    return _viewed(context, args[0], (*sizes[:dim], *new, *sizes[dim + 1 :]))


def _ordered(context: SplitContext, tensor: SplitTensor, order: Sequence[int]) -> SplitTensor:
    return wrap(tensor.local.permute(*order), permute(tensor.placement, tuple(order)), context)


@rule("transpose", "swapaxes", "swapdims")
def _transpose(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, second = [value % args[0].dim() for value in (*args[1:], *kwargs.values())]
    order = list(range(args[0].dim()))
    order[first], order[second] = second, first
    return _ordered(context, args[0], order)


@rule("permute")
def _permuted(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _ordered(context, args[0], [dim % args[0].dim() for dim in _sizes(args[1:], kwargs, "dims")])


@rule("t", "adjoint")
def _transposed(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].local.is_complex():  # some conjugate
        return NotImplemented
    order = list(range(args[0].dim()))
    return _ordered(context, args[0], [*order[:-2], *reversed(order[-2:])])


def _reversed_property(context: SplitContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _ordered(context, args[0], list(reversed(range(args[0].dim()))))


for _name in ("mT", "mH", "H"):
    RULES[getattr(Tensor, _name).__get__] = _transposed
RULES[Tensor.T.__get__] = _reversed_property  # type: ignore[attr-defined]


@rule("movedim", "moveaxis")
def _movedim(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places = torch.empty(tuple(range(2, args[0].dim() + 2)), device="meta")
    moved = func(places, *args[1:], **kwargs)
    return _ordered(context, args[0], [size - 2 for size in moved.shape])


@rule("unsqueeze")
def _unsqueeze(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = bind(("input", "dim"), args, kwargs)["dim"] % (args[0].dim() + 1)
    return wrap(args[0].local.unsqueeze(dim), insert(args[0].placement, dim), context)


@rule("squeeze")
def _squeeze(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layout = args[0].placement
    dims = _sizes(args[1:], kwargs, "dim") or tuple(range(len(layout.sizes)))
    gone = frozenset(dim % len(layout.sizes) for dim in dims if layout.sizes[dim] == 1)
    result = remove(layout, gone)
    return wrap(args[0].local.reshape(result.local_sizes(context.degree)), result, context)


@rule("expand", "expand_as", "broadcast_to")
def _expand(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, rest = args[0], args[1:]
    if not isinstance(tensor, SplitTensor):
        return tensor.expand(rest[0].shape)
    if rest and isinstance(rest[0], Tensor):
        rest = (tuple(rest[0].shape),)
    sizes, layout = _sizes(rest, kwargs, "size", "shape"), tensor.placement
    new = len(sizes) - len(layout.sizes)
    sizes = tuple(layout.sizes[dim - new] if size == -1 else size for dim, size in enumerate(sizes))
    result = Layout(sizes, layout.dim + new, layout.outer)
    return wrap(tensor.local.expand(result.local_sizes(context.degree)), result, context)


@rule("repeat")
def _repeat(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    times, layout = _sizes(args[1:], kwargs, "repeats"), args[0].placement
    new = len(times) - len(layout.sizes)
    sizes = tuple(size * time for size, time in zip((*(1,) * new, *layout.sizes), times, strict=True))
    dim = layout.dim + new
    return wrap(args[0].local.repeat(times), Layout(sizes, dim, layout.outer * times[dim]), context)


@rule("repeat_interleave")
def _repeat_interleave(
    context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = bind(("input", "repeats", "dim"), args, kwargs, dim=None)
    if given["dim"] is None or not isinstance(given["repeats"], int):
        return NotImplemented
    layout, dim = args[0].placement, given["dim"] % args[0].dim()
    result = layout.resized(dim, layout.sizes[dim] * given["repeats"])
    return wrap(args[0].local.repeat_interleave(given["repeats"], dim), result, context)


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("tensor", "by", "dim"), args, kwargs, dim=0)
    tensor = args[0]
    layout, dim = tensor.placement, given["dim"] % tensor.dim()
    likeness = torch.empty(layout.sizes[dim], device="meta")
    named = {key: value for key, value in kwargs.items() if key != "dim"}
    counts = [piece.numel() for piece in func(likeness, *args[1:2], dim=0, **named)]
    layouts = []
    start = 0
    for count in counts:
        cut = slice_shared(layout, start, start + count) if dim == layout.dim else layout.resized(dim, count)
        if cut is None:
            return NotImplemented
        layouts.append(cut)
        start += count
    pieces = tensor.local.split([piece.local_sizes(context.degree)[dim] for piece in layouts], dim)
    return tuple(wrap(piece, cut, context) for piece, cut in zip(pieces, layouts, strict=True))


@rule("unbind")
def _unbind(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim, layout = bind(("input", "dim"), args, kwargs, dim=0)["dim"] % args[0].dim(), args[0].placement
    if dim == layout.dim:
        return NotImplemented
    return tuple(wrap(piece, remove(layout, frozenset((dim,))), context) for piece in args[0].local.unbind(dim))


def _iterate(context: SplitContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _unbind(context, func, args, kwargs)
    return result if result is NotImplemented else iter(result)


RULES[Tensor.__iter__] = _iterate


@rule("narrow", "select")
def _narrow(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "dim", "start", "length"), args, kwargs)
    dim, start = given["dim"] % args[0].dim(), given.get("index", given.get("start"))
    if not isinstance(start, int):
        return NotImplemented
    item = slice(start, start + given["length"]) if "length" in given else start
    return _getitem(context, func, (args[0], (*(slice(None),) * dim, item)), {})


@rule("__getitem__")
def _getitem(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, items = args
    if not isinstance(tensor, SplitTensor):
        return NotImplemented
    items = complete_index(items, tensor.dim())
    found = None if items is None else index(tensor.placement, items, context.degree)
    return NotImplemented if found is None else wrap(tensor.local[found[0]], found[1], context)


@rule("__setitem__")
def _setitem(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, items, value = args
    if not isinstance(tensor, SplitTensor):
        tensor[whole(items)] = whole(value)
        return None
    items = complete_index(items, tensor.dim())
    found = None if items is None else index(tensor.placement, items, context.degree)
    if found is None:
        return NotImplemented
    tensor.local[found[0]] = operand(context, value, found[1])
    return None


@rule("cat", "concat", "concatenate")
def _cat(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("tensors", "dim"), args, kwargs, dim=0)
    # torch lets empty vectors take part and leaves them out, as those of caches that were never filled.
    tensors = [tensor for tensor in given["tensors"] if tensor.dim() != 1 or tensor.numel() > 0]
    dim = given.get("axis", given["dim"])
    main = next(tensor for tensor in tensors if isinstance(tensor, SplitTensor)).placement
    dim %= len(main.sizes)
    if any(tensor.dim() != len(main.sizes) for tensor in tensors):
        return NotImplemented
    result = main.resized(dim, sum(tensor.shape[dim] for tensor in tensors))
    if dim == main.dim:
        if not all(isinstance(tensor, SplitTensor) and tensor.placement.dim == dim for tensor in tensors):
            return NotImplemented
        pieces = [piece for tensor in tensors for piece in tensor.placement.pieces]
        parts = torch.cat([tensor.local for tensor in tensors], dim)
        return wrap(parts, Layout(result.sizes, dim, outer_of(pieces)), context)
    return wrap(torch.cat([operand(context, tensor, main) for tensor in tensors], dim), result, context)


@rule("stack")
def _stack(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("tensors", "dim"), args, kwargs, dim=0)
    tensors = list(given["tensors"])
    main = next(tensor for tensor in tensors if isinstance(tensor, SplitTensor)).placement
    dim = given["dim"] % (len(main.sizes) + 1)
    parts = [operand(context, tensor, main) for tensor in tensors]
    return wrap(torch.stack(parts, dim), insert(main, dim, len(tensors)), context)
