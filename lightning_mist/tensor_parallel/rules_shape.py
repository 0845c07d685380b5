"""Rules for views, slices and permutations: the part is viewed as the whole would be."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mist.plan.tensor_split import Factors
from lightning_mist.tensor_parallel import layout as layouts
from lightning_mist.tensor_parallel.layout import Layout
from lightning_mist.tensor_parallel.rules import bind, like, rule
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def _sizes(args: Arguments, kwargs: Keywords) -> tuple[int, ...]:
    """Sizes or dimensions given one by one or as one sequence."""
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    if not args:
        return tuple(next(iter(kwargs.values())))
    return tuple(args)


@rule("transpose", "swapaxes", "swapdims", "transpose_")
def _transpose(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "dim0", "dim1"), args, kwargs)
    tensor, rank = given["input"], len(given["input"].placement)
    first, second = given["dim0"] % rank, given["dim1"] % rank
    layout = list(tensor.placement)
    layout[first], layout[second] = layout[second], layout[first]
    return like(tensor.local.transpose(first, second), tuple(layout), context)


@rule("t")
def _t(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    return _transpose(func, (args[0], 0, 1), {}, context)


@rule("permute")
def _permute(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    tensor = args[0]
    order = [dim % len(tensor.placement) for dim in _sizes(args[1:], kwargs)]
    return like(tensor.local.permute(order), tuple(tensor.placement[dim] for dim in order), context)


@rule("movedim")
def _movedim(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    tensor = args[0]
    order = _moved(func, tensor, args, kwargs)
    return like(tensor.local.permute(order), tuple(tensor.placement[dim] for dim in order), context)


def _moved(func: Callable[..., Any], tensor: SplitTensor, args: Arguments, kwargs: Keywords) -> list[int]:
    """Where each dimension comes from: a tensor whose sizes are all different is moved alike."""
    sizes = [index + 2 for index in range(len(tensor.placement))]
    return [size - 2 for size in func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape]


@rule("view", "reshape", "view_as", "reshape_as")
def _view(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    tensor, rest = args[0], args[1:]
    if rest and isinstance(rest[0], torch.dtype):
        return NotImplemented
    if not isinstance(tensor, SplitTensor):
        return NotImplemented
    if rest and isinstance(rest[0], Tensor):
        rest = tuple(rest[0].shape)
    return _viewed(tensor, _sizes(rest, kwargs), context)


def _viewed(tensor: SplitTensor, sizes: tuple[int, ...], context: SplitContext) -> Any:
    layout = layouts.view(tensor.placement, sizes, context.degree)
    if layout is None:
        return NotImplemented
    return like(tensor.local.reshape(layouts.local_shape(layout, context.degree)), layout, context)


@rule("flatten")
def _flatten(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "start_dim", "end_dim"), args, kwargs, start_dim=0, end_dim=-1)
    tensor, shape = given["input"], layouts.shape_of(given["input"].placement)
    start, end = given["start_dim"] % len(shape), given["end_dim"] % len(shape)
    return _viewed(tensor, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]), context)


@rule("unflatten")
def _unflatten(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "dim", "sizes"), args, kwargs)
    tensor, shape = given["input"], layouts.shape_of(given["input"].placement)
    dim, sizes = given["dim"] % len(shape), list(given["sizes"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // prod(size for size in sizes if size != -1)
    return _viewed(tensor, (*shape[:dim], *sizes, *shape[dim + 1 :]), context)


@rule("unsqueeze")
def _unsqueeze(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "dim"), args, kwargs)
    tensor = given["input"]
    dim = given["dim"] % (len(tensor.placement) + 1)
    layout: Layout = (*tensor.placement[:dim], ((1, False),), *tensor.placement[dim:])
    return like(tensor.local.unsqueeze(dim), layout, context)


@rule("squeeze")
def _squeeze(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    tensor, shape = args[0], layouts.shape_of(args[0].placement)
    dims = args[1] if len(args) > 1 else kwargs.get("dim", tuple(range(len(shape))))
    dims = [dim % len(shape) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    gone = {dim for dim in dims if shape[dim] == 1 and dim != tensor.shared_dim}
    layout = tuple(factors for dim, factors in enumerate(tensor.placement) if dim not in gone)
    return like(tensor.local.reshape(layouts.local_shape(layout, context.degree)), layout, context)


@rule("expand", "expand_as", "broadcast_to")
def _expand(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    tensor = args[0]
    if not isinstance(tensor, SplitTensor):
        return NotImplemented
    sizes = tuple(args[1].shape) if len(args) > 1 and isinstance(args[1], Tensor) else _sizes(args[1:], kwargs)
    shape, offset = layouts.shape_of(tensor.placement), len(sizes) - len(tensor.placement)
    sizes = tuple(shape[index - offset] if size == -1 else size for index, size in enumerate(sizes))
    layout = layouts.broadcast(tensor.placement, sizes)
    return like(tensor.local.expand(layouts.local_shape(layout, context.degree)), layout, context)


def _pieces(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> tuple[SplitTensor, int, list[int]]:
    name = func.__name__
    given = bind(("input", "how", "dim"), args, kwargs, dim=0)
    tensor = given["input"]
    how = next(
        given[key]
        for key in ("how", "split_size_or_sections", "split_size", "chunks", "sections", "indices_or_sections")
        if key in given
    )
    shape = layouts.shape_of(tensor.placement)
    dim = given["dim"] % len(shape)
    if isinstance(how, (tuple, list)) and name != "tensor_split":
        return tensor, dim, list(how)
    probe = torch.empty(shape[dim], device="meta")
    return tensor, dim, [len(piece) for piece in getattr(torch, name.removesuffix("_with_sizes"))(probe, how)]


@rule("split", "chunk", "tensor_split", "split_with_sizes")
def _split(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    tensor, dim, sizes = _pieces(func, args, kwargs)
    found, start = [], 0
    for size in sizes:
        piece = _narrowed(tensor, dim, start, start + size, context)
        if piece is None:
            return NotImplemented
        found.append(piece)
        start += size
    return tuple(found)


def _narrowed(tensor: SplitTensor, dim: int, start: int, end: int, context: SplitContext) -> SplitTensor | None:
    factors: Factors = ((end - start, False),)
    if dim == tensor.shared_dim:
        found = layouts.cut(tensor.placement[dim], start, end, context.degree)
        if found is None:
            return None
        factors, start, end = found
    local = tensor.local.narrow(dim, start, end - start)
    return like(local, layouts.replaced(tensor.placement, dim, factors), context)


@rule("narrow")
def _narrow(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "dim", "start", "length"), args, kwargs)
    tensor, start = given["input"], int(given["start"])
    piece = _narrowed(tensor, given["dim"] % len(tensor.placement), start, start + given["length"], context)
    return NotImplemented if piece is None else piece


@rule("unbind")
def _unbind(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "dim"), args, kwargs, dim=0)
    tensor = given["input"]
    dim = given["dim"] % len(tensor.placement)
    if dim == tensor.shared_dim:
        return NotImplemented
    layout = (*tensor.placement[:dim], *tensor.placement[dim + 1 :])
    return tuple(like(local, layout, context) for local in tensor.local.unbind(dim))


@rule("select")
def _select(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "dim", "index"), args, kwargs)
    tensor = given["input"]
    dim = given["dim"] % len(tensor.placement)
    if dim == tensor.shared_dim:
        return NotImplemented
    layout = (*tensor.placement[:dim], *tensor.placement[dim + 1 :])
    return like(tensor.local.select(dim, given["index"]), layout, context)


@rule("__getitem__")
def _getitem(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    tensor, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(tensor, SplitTensor) or not all(
        item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int for item in items
    ):
        return NotImplemented
    items = _without_ellipsis(items, len(tensor.placement))
    local_items: list[Any] = []
    layout: list[Factors] = []
    dim = 0
    for item in items:
        if item is None:
            local_items.append(None)
            layout.append(((1, False),))
            continue
        found = _indexed(tensor, dim, item, context.degree)
        if found is None:
            return NotImplemented
        factors, local_item = found
        local_items.append(local_item)
        layout += [factors] if factors else []
        dim += 1
    return like(tensor.local[tuple(local_items)], tuple(layout), context)


def _without_ellipsis(items: list[Any], rank: int) -> list[Any]:
    """An index that names every dimension."""
    missing = rank - sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        return items + [slice(None)] * missing
    position = items.index(Ellipsis)
    return [*items[:position], *[slice(None)] * missing, *items[position + 1 :]]


def _indexed(tensor: SplitTensor, dim: int, item: Any, degree: int) -> tuple[Factors, Any] | None:
    """What an index leaves of a dimension (no factors if it is gone), and the index of the part."""
    factors = tensor.placement[dim]
    if isinstance(item, int):
        return None if layouts.is_shared(factors) else ((), item)
    size = prod(count for count, _ in factors)
    start, end, step = item.indices(size)
    if (start, end, step) == (0, size, 1):
        return factors, item
    if not layouts.is_shared(factors):
        return ((len(range(start, end, step)), False),), item
    found = layouts.cut(factors, start, end, degree) if step == 1 else None
    return None if found is None else (found[0], slice(found[1], found[2]))


@rule("cat", "concat", "concatenate")
def _cat(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("tensors", "dim"), args, kwargs, dim=0)
    tensors = given["tensors"]
    first = next(tensor for tensor in tensors if isinstance(tensor, SplitTensor))
    dim, shared = given["dim"] % len(first.placement), first.shared_dim
    pattern = layouts.pattern(first.placement[shared])
    if dim == shared:
        return NotImplemented
    locals_ = []
    for tensor in tensors:
        if isinstance(tensor, SplitTensor):
            if tensor.shared_dim != shared or layouts.pattern(tensor.placement[shared]) != pattern:
                return NotImplemented
            locals_.append(tensor.local)
        else:
            locals_.append(context.part(tensor, shared, pattern.outer))
    total = sum(tensor.shape[dim] for tensor in tensors)
    return like(torch.cat(locals_, dim), layouts.replaced(first.placement, dim, ((total, False),)), context)


@rule("stack")
def _stack(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("tensors", "dim"), args, kwargs, dim=0)
    first = next(tensor for tensor in given["tensors"] if isinstance(tensor, SplitTensor))
    dim = given["dim"] % (len(first.placement) + 1)
    raised = [tensor.unsqueeze(dim) if not isinstance(tensor, SplitTensor) else
              _unsqueeze(func, (tensor, dim), {}, context) for tensor in given["tensors"]]  # fmt: skip
    return _cat(func, (raised, dim), {}, context)


@rule("repeat_interleave")
def _repeat_interleave(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "repeats", "dim"), args, kwargs, dim=None)
    tensor, repeats, dim = given["input"], given["repeats"], given["dim"]
    if dim is None or not isinstance(repeats, int) or not isinstance(tensor, SplitTensor):
        return NotImplemented
    dim %= len(tensor.placement)
    layout = layouts.replaced(tensor.placement, dim, (*tensor.placement[dim], (repeats, False)))
    return like(tensor.local.repeat_interleave(repeats, dim), layout, context)
