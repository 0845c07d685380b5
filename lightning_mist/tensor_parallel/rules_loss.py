"""Rules for losses over classes that are shared out: scores are never gathered."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_mist.tensor_parallel.collectives import ReduceOut
from lightning_mist.tensor_parallel.rules import bind, pattern_of, rule
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@rule("cross_entropy")
def _cross_entropy(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = bind(names, args, kwargs, weight=None, size_average=None, ignore_index=-100, reduce=None)
    scores, target = given["input"], given["target"]
    old = given["size_average"] is not None or given["reduce"] is not None
    if not isinstance(scores, SplitTensor) or isinstance(target, SplitTensor) or old or given["weight"] is not None:
        return NotImplemented
    dim = 1 if len(scores.placement) > 1 else 0
    if scores.shared_dim != dim or pattern_of(scores).outer != 1 or target.is_floating_point():
        return NotImplemented
    return _loss(
        scores, target, dim, context,
        ignore_index=given["ignore_index"], reduction=given.get("reduction", "mean"),
        smoothing=given.get("label_smoothing", 0.0),
    )  # fmt: skip


def _loss(
    scores: SplitTensor, target: Tensor, dim: int, context: SplitContext, *, ignore_index: int, reduction: str,
    smoothing: float,
) -> Tensor:  # fmt: skip
    """Cross entropy of the whole scores: the largest, the sum of exponentials and the target's come from all ranks."""
    local, group = scores.local, context.group
    count = local.shape[dim]
    largest = group.all_reduce(local.detach().amax(dim, keepdim=True).contiguous(), "max")
    shifted = local - largest
    total = _sum(shifted.exp().sum(dim), context)
    rows = target - group.rank * count
    is_ignored = target == ignore_index
    is_elsewhere = (rows < 0) | (rows >= count) | is_ignored
    picked = shifted.gather(dim, rows.masked_fill(is_elsewhere, 0).unsqueeze(dim)).squeeze(dim)
    wanted = _sum(picked.masked_fill(is_elsewhere, 0.0), context)
    losses = total.log() - wanted
    if smoothing > 0.0:
        mean = _sum(shifted.sum(dim), context) / (count * group.size)
        losses = (1.0 - smoothing) * losses + smoothing * (total.log() - mean)
    losses = losses.masked_fill(is_ignored, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (~is_ignored).sum().to(losses.dtype)


def _sum(value: Tensor, context: SplitContext) -> Tensor:
    result: Tensor = ReduceOut.apply(value, context.group)  # type: ignore[no-untyped-call]
    return result
