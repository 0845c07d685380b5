"""Rules for functions along dimensions: sums, softmax, norms."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.parts import bind
from lightning_mist.tensor_parallel.shard_layout import Layout, remove
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor, gathered, rule, wrap


def _dims(layout: Layout, dim: Any) -> frozenset[int]:
    """Dimensions as a function takes them: none given means all."""
    count = len(layout.sizes)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return frozenset(range(count))
    return frozenset(value % count for value in (dim if isinstance(dim, (list, tuple)) else (dim,)))


def _reduced(layout: Layout, dims: frozenset[int], keepdim: bool) -> Layout:
    if not keepdim:
        return remove(layout, dims)
    return Layout(tuple(1 if dim in dims else size for dim, size in enumerate(layout.sizes)), layout.dim, layout.outer)


@rule("sum", "mean")
def _sums(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "dim", "keepdim"), args, kwargs, dim=None, keepdim=False, dtype=None)
    if "axis" in given or given.get("out") is not None or isinstance(given["dim"], torch.dtype):
        return NotImplemented
    layout, part = args[0].placement, args[0].local
    dims = _dims(layout, given["dim"])
    along, keepdim = sorted(dims), given["keepdim"]
    if layout.dim not in dims:
        result = func(part, along, keepdim=keepdim, dtype=given["dtype"])
        return wrap(result, _reduced(layout, dims, keepdim), context)
    total = collectives.reduce(torch.sum(part, along, keepdim=keepdim, dtype=given["dtype"]), context.group)
    if func.__name__ == "mean":
        return total / prod(layout.sizes[dim] for dim in dims)
    return total


@rule("amax", "amin", "logsumexp", "var", "std", "norm", "argmax", "argmin", "any", "all", "prod", "count_nonzero")
def _reductions(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names: tuple[str, ...] = ("input", "dim", "keepdim")
    if func.__name__ == "norm":
        names = ("input", "p", "dim", "keepdim")
    elif func.__name__ in ("var", "std"):  # what comes third is not what is kept
        names = ("input", "dim")
    given = bind(names, args, kwargs, dim=None, keepdim=False)
    if not _is_dim(given["dim"]) or given.get("out") is not None or "axis" in given or len(args) > len(names):
        return NotImplemented
    layout = args[0].placement
    dims = _dims(layout, given["dim"])
    if layout.dim in dims or not isinstance(given["keepdim"], bool):
        return NotImplemented
    result = func(args[0].local, *args[1:], **kwargs)
    return wrap(result, _reduced(layout, dims, given["keepdim"]), context)


def _is_dim(value: Any) -> bool:
    return type(value) is int or (isinstance(value, (list, tuple)) and all(type(dim) is int for dim in value))


@rule("max", "min")
def _extremes(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest of all, along a dimension, or element by element of two tensors."""
    given = bind(("input", "dim", "keepdim"), args, kwargs, dim=None, keepdim=False)
    if isinstance(given["dim"], Tensor):
        return (torch.maximum if func.__name__ == "max" else torch.minimum)(*args)
    layout, dim = getattr(args[0], "placement", None), given["dim"]
    if type(dim) is not int or layout is None or dim % len(layout.sizes) == layout.dim or "other" in kwargs:
        return NotImplemented
    result = func(args[0].local, dim, given["keepdim"])
    reduced = _reduced(layout, frozenset((dim % len(layout.sizes),)), given["keepdim"])
    return type(result)(tuple(wrap(value, reduced, context) for value in result))


@rule(
    *("flip", "cumsum", "cumprod", "sort", "argsort", "softmin", "normalize", "cummax", "cummin", "logcumsumexp"),
    *("glu", "topk"),
)
def _along(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = {"normalize": ("input", "p", "dim"), "topk": ("input", "k", "dim")}.get(func.__name__, ("input", "dim"))
    given = bind(names, args, kwargs, dim={"normalize": 1}.get(func.__name__, -1))
    dim = given.get("dims", given["dim"])
    if func.__name__ == "flip" and len(args) > 2:
        dim = args[1:]
    layout = args[0].placement
    if not _is_dim(dim) or layout.dim in _dims(layout, dim) or kwargs.get("out") is not None:
        return NotImplemented
    result = func(args[0].local, *args[1:], **kwargs)
    if isinstance(result, Tensor):
        return _as_whole(context, result, layout)
    return type(result)(tuple(_as_whole(context, value, layout) for value in result))


def _as_whole(context: SplitContext, part: Tensor, layout: Layout) -> SplitTensor:
    sizes = list(part.shape)
    sizes[layout.dim] *= context.degree
    return wrap(part, Layout(tuple(sizes), layout.dim, layout.outer), context)


@rule("softmax", "log_softmax")
def _softmax(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Softmax and its logarithm; along the shared dimension from the ranks' maxima and sums."""
    given = bind(("input", "dim"), args, kwargs, dim=None)
    layout, part, dim = args[0].placement, args[0].local, given["dim"]
    if type(dim) is not int or kwargs.get("out") is not None:
        return NotImplemented
    if dim % len(layout.sizes) != layout.dim:
        return wrap(func(part, *args[1:], **kwargs), layout, context)
    dtype = next((value for value in (*args[2:], kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)
    result_type = dtype or loss_type(part)
    part = wide(part, dtype)
    shifted = part - maximum(context, part, layout.dim)
    total = collectives.reduce(shifted.exp().sum(layout.dim, keepdim=True), context.group)
    total = collectives.copy_in(total.log(), context.group)
    result = shifted - total
    result = result if func.__name__ == "log_softmax" else result.exp()
    return wrap(result.to(result_type), layout, context)


def maximum(context: SplitContext, part: Tensor, dim: int) -> Tensor:
    """The largest value over all ranks along a dimension, which is kept; without gradient."""
    return context.group.all_reduce(part.detach().amax(dim, keepdim=True).contiguous(), "max")


def wide(part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor in the type in which torch computes softmax and losses: halves in single precision."""
    part = part if dtype is None else part.to(dtype)
    return part.float() if part.dtype in (torch.float16, torch.bfloat16) else part


def loss_type(part: Tensor) -> torch.dtype:
    """The type in which torch returns softmax and losses: single precision under autocast."""
    is_wide = torch.is_autocast_enabled(part.device.type) and part.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_wide else part.dtype


@rule("layer_norm", "rms_norm")
def _norms(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    shape = bind(("input", "normalized_shape"), args, kwargs)["normalized_shape"]
    if not isinstance(x, SplitTensor) or x.placement.dim >= x.dim() - len(shape):
        return NotImplemented

    def convert(value: Any) -> Any:
        return collectives.copy_in(gathered(value), context.group) if isinstance(value, Tensor) else value

    rest = tuple(convert(value) for value in args[1:])
    named = {key: convert(value) for key, value in kwargs.items()}
    return wrap(func(x.local, *rest, **named), x.placement, context)


@rule("pad")
def _pad(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Padding of last dimensions, not of the shared one."""
    widths = bind(("input", "pad"), args, kwargs)["pad"]
    layout = args[0].placement
    start = 2 * (len(layout.sizes) - 1 - layout.dim)
    if any(widths[start : start + 2]):
        return NotImplemented
    return _as_whole(context, F.pad(args[0].local, *args[1:], **kwargs), layout)
