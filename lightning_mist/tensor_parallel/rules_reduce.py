"""Rules for functions along dimensions: sums, softmax, norms, embeddings, losses."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.parts import bind
from lightning_mist.tensor_parallel.shard_layout import Layout, remove
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor, gathered, layout_of, rule, wrap


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


# Embeddings and losses whose words or classes are shared (Megatron-LM, arXiv 1909.08053, section 3).


@rule("embedding")
def _embedding(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows looked up in a table whose rows or columns are shared, or for shared indices."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = bind(names, args, kwargs, padding_idx=None, max_norm=None, scale_grad_by_freq=False, sparse=False)
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():  # torch.embedding takes the table first
        return NotImplemented
    indices, table = given["input"], given["weight"]
    if given["max_norm"] is not None or given["sparse"]:
        raise TraceError(
            f"embedding of {tuple(table.shape)} with max_norm={given['max_norm']}, sparse={given['sparse']} is split: "
            "it would write into its table or make sparse gradients. Leave it whole"
        )
    known, padding = layout_of(table), given["padding_idx"]
    if given["scale_grad_by_freq"]:
        return NotImplemented
    if known is None:
        out = F.embedding(indices.local, collectives.copy_in(table, context.group), padding)
        layout = indices.placement
        return wrap(out, Layout((*layout.sizes, table.shape[1]), layout.dim, layout.outer), context)
    indices = gathered(indices)
    if known.dim == 1:
        sizes = (*indices.shape, known.sizes[1])
        out = F.embedding(indices, table.local, padding)
        return wrap(out, Layout(sizes, len(sizes) - 1, known.outer), context)
    if known.outer != 1:
        return NotImplemented
    at, is_here = _here(context, indices, known.sizes[0])
    padding = None if padding is None else padding % known.sizes[0] - context.rank * (known.sizes[0] // context.degree)
    if padding is not None and not 0 <= padding < known.sizes[0] // context.degree:
        padding = None
    rows = F.embedding(at, table.local, padding)
    # Whole also with sequence parallelism: what comes between here and the first block is the same in every step,
    # whether or not a sequence is known already.
    return collectives.reduce(rows.masked_fill(~is_here.unsqueeze(-1), 0), context.group)


def _here(context: SplitContext, indices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where indices are in this rank's part, 0 if they are not in it, and whether they are."""
    length = count // context.degree
    at = indices - context.rank * length
    is_here = (at >= 0) & (at < length)
    return at.masked_fill(~is_here, 0), is_here


_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")


@rule("cross_entropy", "nll_loss")
def _class_loss(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss of shared logits (or logarithms of probabilities) without gathering them.

    Where the classes are shared, every rank gives the maximum, the sum of exponentials and the target's value of its
    part. Where positions are, every rank gives the losses of its own. Targets that are probabilities, and the old
    arguments for reductions, are left to the whole computation.
    """
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    given = bind((*_LOSS, "label_smoothing"), args, kwargs, **defaults)
    logits, target = given["input"], given["target"]
    if not isinstance(logits, SplitTensor) or given.get("size_average") is not None or given.get("reduce") is not None:
        return NotImplemented
    layout = logits.placement
    if len(layout.sizes) == 1 or target.is_floating_point():
        return NotImplemented
    target, weight = gathered(target), None if given["weight"] is None else gathered(given["weight"])
    is_kept = target != given["ignore_index"]
    classes = target.masked_fill(~is_kept, 0)
    scale = is_kept.to(loss_type(logits.local)) if weight is None else weight[classes] * is_kept
    if layout.dim == 1:
        if layout.outer != 1:
            return NotImplemented
        losses = _class_losses(context, logits, classes, weight, given["label_smoothing"], func.__name__ == "nll_loss")
        losses = losses.masked_fill(~is_kept, 0).to(loss_type(logits.local))
        return _combined(losses, scale, given["reduction"])
    dim = 0 if layout.dim == 0 else layout.dim - 1
    targets = Layout(tuple(target.shape), dim, layout.outer)
    if func.__name__ == "cross_entropy":
        given["label_smoothing"] = kwargs.get("label_smoothing", given["label_smoothing"])
    extra = {"label_smoothing": given["label_smoothing"]} if func.__name__ == "cross_entropy" else {}
    losses = (F.cross_entropy if extra else F.nll_loss)(
        logits.local, collectives.scatter(target, targets, context.group), weight,
        ignore_index=given["ignore_index"], reduction="none", **extra,
    )  # fmt: skip
    if given["reduction"] == "none":
        return wrap(losses, targets, context)
    return _combined(collectives.reduce(losses.sum(), context.group), scale, given["reduction"])


def _combined(losses: Tensor, scale: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / scale.sum()


def _class_losses(
    context: SplitContext, logits: SplitTensor, classes: Tensor, weight: Tensor | None, smoothing: float, is_log: bool
) -> Tensor:
    """The loss of every position from logits (or logarithms of probabilities) whose classes are shared."""
    part, count = wide(logits.local), logits.placement.sizes[1]
    at, is_here = _here(context, classes, count)
    if not is_log:
        part = part - maximum(context, part, 1)
    picked = part.gather(1, at.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0)
    own = None if weight is None else weight.narrow(0, context.rank * part.shape[1], part.shape[1])
    shape = (1, -1, *(1,) * (part.dim() - 2))
    summands = [picked]
    if not is_log:
        summands.append(part.exp().sum(1))
    if smoothing > 0:
        summands.append((part if own is None else part * own.view(shape)).sum(1))
    sums = collectives.reduce(torch.stack(summands), context.group).unbind(0)
    if is_log:
        losses = -sums[0]
        return losses if weight is None else losses * weight[classes]
    normalizer = sums[1].log()
    losses = normalizer - sums[0]
    losses = losses if weight is None else losses * weight[classes]
    if smoothing > 0:
        total = count if weight is None else weight.sum()
        losses = (1 - smoothing) * losses + smoothing / count * (total * normalizer - sums[2])
    return losses
