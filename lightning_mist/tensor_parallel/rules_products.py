"""Rules for products of matrices, and for attention.

A dimension of a product plays one of four parts: *rows* of the left operand, *columns* of the right one, *inner* (what
is summed over), or *batch*. With the right operand a weight, sharing its columns is column parallelism: inputs are
whole, outputs shared. Sharing the inner dimension is row parallelism: inputs are shared, the ranks' outputs summands.

Of attention heads are shared, and under context parallelism positions of queries. Keys and values of all positions are
then gathered, and queries of a rank attend to those of them that they see. Their gradients are scattered back as sums.
Gathering is one collective before and one behind the largest operation of a layer (Llama 3 does so too, arXiv
2407.21783, section 3.3.2); with fewer heads of keys than of queries little is sent. A ring that hides them would need
attention that returns its normalizers, which the public function does not.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.parts import bind, input_of, operand, part_along, summed
from lightning_mist.tensor_parallel.rules_elementwise import own_stream
from lightning_mist.tensor_parallel.shard_layout import Layout, broadcast
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor, gathered, layout_of, local_of, rule, wrap


@rule("linear")
def _linear(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "weight", "bias"), args, kwargs, bias=None)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    known = layout_of(weight)
    if weight.dim() != 2:
        return NotImplemented
    if known is not None and known.dim == 0:
        bias = None if bias is None else part_along(context, bias, 0, known.outer)
        sizes = (*x.shape[:-1], known.sizes[0])
        out = F.linear(input_of(context, x), local_of(weight), bias)
        return wrap(out, Layout(sizes, len(sizes) - 1, known.outer), context)
    shared = known or layout_of(x)
    if shared is None:
        return NotImplemented  # only the bias is split
    if known is not None or shared.is_last:
        summand = F.linear(part_along(context, x, -1, shared.outer), part_along(context, weight, 1, shared.outer))
        total = summed(context, summand)
        return total if bias is None else total + gathered(bias)
    bias = None if bias is None else collectives.copy_in(gathered(bias), context.group)
    out = F.linear(local_of(x), collectives.copy_in(weight, context.group), bias)
    return wrap(out, shared.resized(len(shared.sizes) - 1, weight.shape[0]), context)


@rule("matmul", "mm", "bmm", "__matmul__", "__rmatmul__")
def _matmul(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The product; NotImplemented where one operand is a vector or both are shared in ways that do not meet."""
    if kwargs.get("out") is not None or len(args) + len(kwargs) != 2:
        return NotImplemented
    left, right = (*args, *kwargs.values())
    if func == Tensor.__rmatmul__:
        left, right = right, left
    if left.dim() < 2 or right.dim() < 2:
        return NotImplemented
    known_left, known_right = layout_of(left), layout_of(right)
    at_left = 0 if known_left is None else known_left.from_end
    at_right = 0 if known_right is None else known_right.from_end
    result: Any = NotImplemented
    if known_right is not None and at_right == -1:
        if at_left >= -2 or right.dim() == 2:
            product = torch.matmul(input_of(context, left), local_of(right))
            result = wrap(product, Layout(_sizes(left, right), product.dim() - 1, known_right.outer), context)
    elif at_left == -1 or at_right == -2:
        inner = known_right if at_right == -2 else known_left
        if inner is not None and at_left >= -2 and at_right >= -2:
            parts = part_along(context, left, -1, inner.outer), part_along(context, right, -2, inner.outer)
            result = summed(context, torch.matmul(*parts))
    elif at_left == -2:
        if known_left is not None and known_right is None:
            product = torch.matmul(local_of(left), collectives.copy_in(right, context.group))
            result = wrap(product, Layout(_sizes(left, right), product.dim() - 2, known_left.outer), context)
    else:
        main = known_right if known_left is None else known_left
        if main is not None:
            sizes = _sizes(left, right)
            layout = Layout(sizes, len(sizes) + main.from_end, main.outer)
            product = torch.matmul(operand(context, left, layout), operand(context, right, layout))
            result = wrap(product, layout, context)
    return result


def _sizes(left: Tensor, right: Tensor) -> tuple[int, ...]:
    return (*broadcast(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])


@rule("addmm", "baddbmm")
def _addmm(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "left", "right"), args, kwargs, beta=1, alpha=1)
    left = next(given[name] for name in ("left", "mat1", "batch1") if name in given)
    right = next(given[name] for name in ("right", "mat2", "batch2") if name in given)
    added, known = given["input"], layout_of(right)
    if kwargs.get("out") is not None:
        return NotImplemented
    if known is not None and known.is_last and right.dim() == 2 and added.dim() == 1:
        layout = Layout((left.shape[0], known.sizes[1]), 1, known.outer)
        scale = {"beta": given["beta"], "alpha": given["alpha"]}
        bias = part_along(context, added, 0, known.outer)
        return wrap(torch.addmm(bias, input_of(context, left), local_of(right), **scale), layout, context)
    product = torch.matmul(left, right)
    product = product if given["alpha"] == 1 else product * given["alpha"]
    if given["beta"] == 0 and not added.requires_grad:  # torch does not look at what it holds then
        return product
    return product + (added if given["beta"] == 1 else added * given["beta"])


@rule("einsum")
def _einsum(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums over products named by letters: on parts if one letter is shared."""
    equation, tensors = args[0], args[1:]
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    if not isinstance(equation, str) or "." in equation:
        return NotImplemented
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or any(len(set(term)) != len(term) for term in terms):
        return NotImplemented
    layouts = [layout_of(tensor) for tensor in tensors]
    shared = {(term[found.dim], found.outer) for term, found in zip(terms, layouts, strict=True) if found is not None}
    if len(shared) != 1:
        return NotImplemented
    letter, outer = next(iter(shared))
    parts = [
        part_along(context, tensor, term.index(letter), outer)
        if letter in term
        else collectives.copy_in(tensor, context.group)
        for term, tensor in zip(terms, tensors, strict=True)
    ]
    result = torch.einsum(equation, *parts)
    if letter not in output:
        return summed(context, result)
    sizes = list(result.shape)
    sizes[output.index(letter)] *= context.degree
    return wrap(result, Layout(tuple(sizes), output.index(letter), outer), context)


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@rule("scaled_dot_product_attention")
def _attention(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(_SDPA, args, kwargs, attn_mask=None, dropout_p=0.0, is_causal=False)
    query = given.pop("query")
    known = layout_of(query)
    if known is not None and known.from_end == -2 and context.adds_later:
        return _of_positions(context, func, query, given)
    if known is None or known.from_end > -3:
        return NotImplemented
    key, value, mask = given.pop("key"), given.pop("value"), given.pop("attn_mask")
    if known.from_end == -3 and not all(_heads_meet(tensor, known, given) for tensor in (key, value)):
        return NotImplemented
    parts = [_heads(context, tensor, known) for tensor in (key, value)]
    mask = operand(context, mask, known)
    with own_stream(query.local, context.rank) if given["dropout_p"] > 0 else nullcontext():
        result = func(query.local, *parts, attn_mask=mask, **given)
    sizes = (*known.sizes[:-1], value.shape[-1])
    return wrap(result, Layout(sizes, known.dim, known.outer), context)


def _of_positions(context: SplitContext, func: Callable[..., Any], query: SplitTensor, given: dict[str, Any]) -> Any:
    """Attention of queries whose positions are shared, which must come in order."""
    known, mask, is_causal = query.placement, given.pop("attn_mask"), given.pop("is_causal")
    sides = [given.pop("key"), given.pop("value")]
    parts = [side for side in sides if isinstance(side, SplitTensor)]
    if not all(side.placement.is_like(known) for side in parts):
        return NotImplemented
    if is_causal and (mask is not None or len(parts) < len(sides)):
        return NotImplemented
    key, value = (
        collectives.gather(side.local, side.placement, context.group, is_partial=True)
        if isinstance(side, SplitTensor)
        else collectives.copy_in(side, context.group)
        for side in sides
    )
    with own_stream(query.local, context.rank) if given["dropout_p"] > 0 else nullcontext():
        if not is_causal:
            result = func(query.local, key, value, attn_mask=operand(context, mask, known), is_causal=False, **given)
        else:
            result = torch.cat([_causal(func, *run, key, value, given) for run in _runs(context, query)], -2)
    return wrap(result, Layout((*known.sizes[:-1], value.shape[-1]), known.dim, known.outer), context)


def _runs(context: SplitContext, query: SplitTensor) -> Iterator[tuple[Tensor, int]]:
    """The rank's queries, by runs of neighbouring positions, each with the position behind its last."""
    start = 0
    local = torch.split(query.local, [piece // context.degree for piece in query.placement.pieces], -2)
    for piece, run in zip(query.placement.pieces, local, strict=True):
        yield run, start + (context.rank + 1) * (piece // context.degree)
        start += piece


def _causal(
    func: Callable[..., Any], query: Tensor, end: int, key: Tensor, value: Tensor, given: dict[str, Any]
) -> Any:
    """Attention of queries at the positions before ``end``, none of which sees what lies behind itself."""
    key, value = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
    length = query.shape[-2]
    if length == end:
        return func(query, key, value, attn_mask=None, is_causal=True, **given)
    if query.is_cuda:
        mask: Tensor = causal_lower_right(length, end)  # only said, and not made
    else:
        mask = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(end - length)
    return func(query, key, value, attn_mask=mask, is_causal=False, **given)


def _heads_meet(tensor: Tensor, query: Layout, given: dict[str, Any]) -> bool:
    """Whether a rank's query heads use only a rank's part of these heads, or all share one."""
    count, known = tensor.shape[-3], layout_of(tensor)
    if query.outer != 1 and count != query.sizes[query.dim]:
        return False
    if known is None:
        return count in (1, query.sizes[query.dim])
    return known.from_end == -3 and (known.outer == query.outer)


def _heads(context: SplitContext, tensor: Tensor, query: Layout) -> Tensor:
    if isinstance(tensor, SplitTensor) and tensor.placement.from_end == query.from_end:
        return tensor.local
    part: Tensor = operand(context, tensor, query)
    return part


_MHA = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip
_MHA_DEFAULTS = {
    "training": True, "key_padding_mask": None, "need_weights": True, "attn_mask": None,
    "use_separate_proj_weight": False, "static_k": None, "static_v": None, "average_attn_weights": True,
    "is_causal": False,
}  # fmt: skip


@rule("multi_head_attention_forward")
def _multi_head(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``nn.MultiheadAttention`` with packed or separate projections, written as functions that have rules.

    Keys and values that are given ready-made or get an additional row are left to the whole computation.
    """
    given = bind(_MHA, args, kwargs, **_MHA_DEFAULTS)
    unusual = ("bias_k", "bias_v", "static_k", "static_v")
    if any(given[name] is not None for name in unusual) or given["add_zero_attn"] or given["query"].dim() != 3:
        return NotImplemented
    num_heads, query = given["num_heads"], given["query"]
    length, rows, width = query.shape
    q, k, v = (_heads_first(value, num_heads) for value in _projections(given))
    mask = _mask(given, rows, num_heads, q.dtype)
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if given["need_weights"]:
        scores = torch.matmul(q * (1.0 / (width // num_heads)) ** 0.5, k.transpose(-2, -1))
        weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout, dropout > 0)
        out = torch.matmul(weights, v)
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        is_causal = given["is_causal"] and mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
    out = out.permute(2, 0, 1, 3).reshape(length, rows, width)
    return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), weights


def _projections(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (length, rows, width)."""
    query, key, value, bias = given["query"], given["key"], given["value"], given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = tuple(given[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"))
    elif query is key and key is value:
        q, k, v = F.linear(query, given["in_proj_weight"], bias).chunk(3, -1)
        return q, k, v
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _heads_first(value: Tensor, num_heads: int) -> Tensor:
    """(length, rows, width) as (rows, heads, length, width per head)."""
    length, rows, width = value.shape
    return value.view(length, rows, num_heads, width // num_heads).permute(1, 2, 0, 3)


def _mask(given: dict[str, Any], rows: int, num_heads: int, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one to be added, that broadcasts to (rows, heads, length, source length)."""
    mask: Tensor | None = given["attn_mask"]
    padding: Tensor | None = given["key_padding_mask"]
    if given["is_causal"] and padding is None and not given["need_weights"]:
        return None
    if mask is not None:
        mask = _added(mask, dtype)
        mask = torch.unflatten(mask, 0, (rows, num_heads)) if mask.dim() == 3 else mask
    if padding is not None:
        padding = _added(padding, dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add; where a boolean one is set, nothing is attended to."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
