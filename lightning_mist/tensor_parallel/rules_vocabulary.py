"""Rules for embeddings and losses whose words or classes are shared (Megatron-LM, arXiv 1909.08053, section 3)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.parts import bind
from lightning_mist.tensor_parallel.rules_reduce import loss_type, maximum, wide
from lightning_mist.tensor_parallel.shard_layout import Layout
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor, gathered, layout_of, rule, wrap


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
