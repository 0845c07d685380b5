"""Rules for what multiplies by parameters: linear layers, their transposed kind, and embeddings.

A weight whose outputs are shared out gives each rank its outputs of the whole input (*column parallel*); one whose
inputs are shared out gives each rank a part of the sum over its inputs (*row parallel*), and the sum of the ranks'
parts is the result (Shoeybi et al., Megatron-LM, 2019). With hidden states shared along the sequence the input is
gathered before the first and the sum is scattered after the second (Korthikanti et al., 2022).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mist.tensor_parallel import layout as layouts
from lightning_mist.tensor_parallel.rules import bind, like, pattern_of, rule
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor, gathered

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@rule("linear")
def _linear(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "weight", "bias"), args, kwargs, bias=None)
    return linear(given["input"], given["weight"], given["bias"], context)


def linear(value: Tensor, weight: Tensor, bias: Tensor | None, context: SplitContext) -> Any:
    """``value @ weight.T + bias`` with any of them split."""
    if not isinstance(weight, SplitTensor):
        return _whole_weight(value, weight, bias, context)
    if len(weight.placement) != 2:
        return NotImplemented
    if weight.shared_dim == 0:
        return _column(value, weight, bias, context)
    return _row(value, weight, bias, context)


def _whole_weight(value: Tensor, weight: Tensor, bias: Tensor | None, context: SplitContext) -> Any:
    """A weight that every rank has: each applies it to its part, unless the part is one of the inputs of a sum."""
    if isinstance(bias, SplitTensor) or not isinstance(value, SplitTensor):
        return NotImplemented
    if value.shared_dim == len(value.placement) - 1:
        return NotImplemented
    local = F.linear(value.local, context.copy_in(weight), context.copy_in(bias))
    return like(local, (*value.placement[:-1], ((weight.shape[0], False),)), context)


def _column(value: Tensor, weight: SplitTensor, bias: Tensor | None, context: SplitContext) -> Any:
    if bias is not None and not isinstance(bias, SplitTensor):
        bias = context.part(bias, 0, pattern_of(weight).outer)
    elif isinstance(bias, SplitTensor):
        bias = bias.local
    local = F.linear(_input_of_column(value, context), weight.local, bias)
    return like(local, (*layouts.plain(local.shape[:-1]), weight.placement[0]), context)


def _input_of_column(value: Tensor, context: SplitContext) -> Tensor:
    """The whole input, whose gradient is the sum of what every rank's outputs make of it."""
    if isinstance(value, SplitTensor):
        return gathered(value, is_shared_work=True)
    copied: Tensor = context.copy_in(value)
    return copied


def _row(value: Tensor, weight: SplitTensor, bias: Tensor | None, context: SplitContext) -> Any:
    product = F.linear(_input_of_row(value, weight, 1, context), weight.local)
    return _with_bias(context.reduce_out(product), bias, context)


def _input_of_row(value: Tensor, weight: SplitTensor, dim: int, context: SplitContext) -> Tensor:
    """The inputs that belong to this rank's part of the weight."""
    pattern = layouts.pattern(weight.placement[dim])
    last = len(value.shape) - 1
    if isinstance(value, SplitTensor):
        if value.shared_dim == last and pattern_of(value) == pattern:
            return value.local
        if value.shared_dim == last:
            context.gathered["linear"] += 1
        value = gathered(value)
    return context.part(value, last, pattern.outer)


def _with_bias(result: Any, bias: Tensor | None, context: SplitContext) -> Any:
    """The bias is added once, after the sum."""
    if bias is None:
        return result
    if isinstance(bias, SplitTensor):
        bias = gathered(bias)
    if isinstance(result, SplitTensor):
        return like(result.local + context.copy_in(bias), result.placement, context)
    return result + bias


@rule("addmm")
def _addmm(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "mat1", "mat2"), args, kwargs)
    weight = given["mat2"]
    if not isinstance(weight, SplitTensor) or {"beta", "alpha", "out"} & given.keys():
        return NotImplemented
    return _transposed(given["mat1"], weight, given["input"], context)


def _transposed(value: Tensor, weight: SplitTensor, bias: Tensor | None, context: SplitContext) -> Any:
    """``value @ weight + bias`` for a weight with its inputs first, as in GPT-2."""
    if len(weight.placement) != 2:
        return NotImplemented
    if weight.shared_dim == 0:
        product = torch.matmul(_input_of_row(value, weight, 0, context), weight.local)
        return _with_bias(context.reduce_out(product), bias, context)
    local = torch.matmul(_input_of_column(value, context), weight.local)
    result = like(local, (*layouts.plain(local.shape[:-1]), weight.placement[1]), context)
    if bias is None:
        return result
    part = bias.local if isinstance(bias, SplitTensor) else context.part(bias, bias.dim() - 1, pattern_of(weight).outer)
    return like(local + part, result.placement, context)


@rule("matmul", "__matmul__", "__rmatmul__", "bmm", "mm")
def _matmul(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "other"), args, {k: v for k, v in kwargs.items() if k != "out"})
    left, right = given["input"], given.get("other", given.get("mat2"))
    if func.__name__ == "__rmatmul__":
        left, right = right, left
    return product(left, right, context)


def product(left: Any, right: Any, context: SplitContext) -> Any:
    """A matrix product of which one or both factors are split."""
    if (
        isinstance(left, SplitTensor)
        and isinstance(right, SplitTensor)
        and len(right.placement) == 2 == len(left.placement)
    ):
        return NotImplemented if right.shared_dim else _transposed(left, right, None, context)
    if isinstance(right, SplitTensor) and len(right.placement) == 2:
        return _transposed(left, right, None, context)
    if isinstance(left, SplitTensor) and isinstance(right, SplitTensor):
        return _batched(left, right, context)
    if isinstance(left, SplitTensor):
        return _times_whole(left, right, context)
    return _whole_times(left, right, context)


def _batched(left: SplitTensor, right: SplitTensor, context: SplitContext) -> Any:
    """Both are shared out along the same batch dimension (heads)."""
    same_place = left.shared_dim - len(left.placement) == right.shared_dim - len(right.placement) < -2
    if not same_place or pattern_of(left) != pattern_of(right):
        return NotImplemented
    local = torch.matmul(left.local, right.local)
    longer = left.placement if len(left.placement) >= len(right.placement) else right.placement
    shape = torch.broadcast_shapes(layouts.shape_of(left.placement)[:-2], layouts.shape_of(right.placement)[:-2])  # type: ignore[no-untyped-call]
    layout = layouts.broadcast(longer[:-2], shape)
    return like(local, (*layout, left.placement[-2], right.placement[-1]), context)


def _times_whole(left: SplitTensor, right: Tensor, context: SplitContext) -> Any:
    """Rows or batches of the left factor are shared out; the right one is used by every rank."""
    if left.shared_dim == len(left.placement) - 1 or (right.dim() > 2 and left.shared_dim < len(left.placement) - 2):
        return NotImplemented
    local = torch.matmul(left.local, context.copy_in(right))
    if right.dim() == 1:
        return like(local, left.placement[:-1], context)
    layout = (*left.placement[:-1], ((right.shape[-1], False),))
    if local.dim() != len(layout):
        return NotImplemented
    return like(local, layout, context)


def _whole_times(left: Tensor, right: SplitTensor, context: SplitContext) -> Any:
    """Columns of the right factor are shared out."""
    if right.shared_dim != len(right.placement) - 1 or left.dim() > len(right.placement) or left.dim() < 2:
        return NotImplemented
    local = torch.matmul(context.copy_in(left), right.local)
    return like(local, (*layouts.plain(local.shape[:-1]), right.placement[-1]), context)


@rule("embedding")
def _embedding(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = bind(names, args, kwargs, padding_idx=None, max_norm=None, scale_grad_by_freq=False, sparse=False)
    tokens, weight = given["input"], given["weight"]
    if not isinstance(weight, SplitTensor) or isinstance(tokens, SplitTensor):
        return NotImplemented
    if given["max_norm"] is not None or given["scale_grad_by_freq"] or given["sparse"]:
        return NotImplemented
    padding = given["padding_idx"]
    if weight.shared_dim == 1:
        local = F.embedding(tokens, weight.local, padding)
        return like(local, (*layouts.plain(tokens.shape), weight.placement[1]), context)
    if pattern_of(weight).outer != 1:
        return NotImplemented
    return _vocabulary(tokens, weight, padding, context)


def _vocabulary(tokens: Tensor, weight: SplitTensor, padding: int | None, context: SplitContext) -> Any:
    """Every rank looks up the tokens whose rows it has; the sum over ranks has them all."""
    count = weight.local.shape[0]
    rows = tokens - context.group.rank * count
    is_elsewhere = (rows < 0) | (rows >= count)
    found = F.embedding(rows.masked_fill(is_elsewhere, 0), weight.local)
    is_without_gradient = is_elsewhere.unsqueeze(-1)
    found = found.masked_fill(is_without_gradient, 0.0)
    if padding is not None:
        # A padding row has a value and no gradient.
        is_padding = (tokens == padding % layouts.shape_of(weight.placement)[0]).unsqueeze(-1)
        found = torch.where(is_padding, found.detach(), found)
    return context.reduce_out(found)
