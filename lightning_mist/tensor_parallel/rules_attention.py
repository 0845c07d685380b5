"""Rules for attention: every rank computes its heads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mist.tensor_parallel import layout as layouts
from lightning_mist.tensor_parallel.random import own_random
from lightning_mist.tensor_parallel.rules import bind, like, pattern_of, rule
from lightning_mist.tensor_parallel.rules_linear import linear
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor, gathered

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@rule("scaled_dot_product_attention")
def _attention(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = bind(names, args, kwargs, attn_mask=None, dropout_p=0.0)
    query, key, value = (given.pop(name) for name in names[:3])
    if not all(
        isinstance(item, SplitTensor) and item.shared_dim == len(item.placement) - 3 for item in (query, key, value)
    ):
        return NotImplemented
    given["attn_mask"] = _mask_part(given["attn_mask"], query, context)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query.local, key.local, value.local, **given)

    if given["dropout_p"] > 0.0:
        with own_random(query.local, context.group):
            local = attend()
    else:
        local = attend()
    return like(local, (*query.placement[:-1], value.placement[-1]), context)


def _mask_part(mask: Tensor | None, query: SplitTensor, context: SplitContext) -> Tensor | None:
    """The mask of this rank's heads."""
    if mask is None:
        return None
    heads = len(mask.shape) - 3
    if isinstance(mask, SplitTensor):
        if mask.shared_dim == heads and pattern_of(mask) == pattern_of(query):
            return mask.local
        mask = gathered(mask)
    if heads >= 0 and mask.shape[heads] != 1:
        return context.part(mask, heads, pattern_of(query).outer)
    copied: Tensor = context.copy_in(mask)
    return copied


@rule("multi_head_attention_forward")
def _packed(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(_NAMES, args, kwargs, **_DEFAULTS)
    weight = given["in_proj_weight"]
    unusual = any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if not isinstance(weight, SplitTensor) or unusual or given["add_zero_attn"] or given["need_weights"]:
        return NotImplemented
    if given["use_separate_proj_weight"] or weight.shared_dim != 0 or given["query"].dim() != 3:
        return NotImplemented
    width = given["embed_dim_to_check"]
    head_width = width // given["num_heads"]
    weights, biases = _thirds(weight, width, context), _thirds(given["in_proj_bias"], width, context)
    if weights is None or pattern_of(weights[0]).outer != 1:
        return NotImplemented
    length, rows, _ = given["query"].shape
    heads = []
    for value, part, bias in zip(
        (given["query"], given["key"], given["value"]), weights, biases or (None,) * 3, strict=True
    ):
        projected = linear(value, part, bias, context)
        local = projected.local.reshape(value.shape[0], rows, -1, head_width)
        heads.append(local.permute(1, 2, 0, 3))
    mask = _joint_mask(given, heads[0], rows, context)
    dropout = given["dropout_p"] if given["training"] else 0.0

    def attend() -> Tensor:
        is_causal = bool(given["is_causal"]) and mask is None
        first, second, third = heads
        return F.scaled_dot_product_attention(
            first, second, third, attn_mask=mask, dropout_p=dropout, is_causal=is_causal
        )

    if dropout > 0.0:
        with own_random(heads[0], context.group):
            attended = attend()
    else:
        attended = attend()
    local = attended.permute(2, 0, 1, 3).reshape(length, rows, -1)
    value = like(local, (*layouts.plain((length, rows)), ((width, True),)), context)
    result = linear(value, given["out_proj_weight"], given["out_proj_bias"], context)
    if result is NotImplemented:
        result = F.linear(gathered(value), given["out_proj_weight"], given["out_proj_bias"])
    return result, None


def _thirds(packed: SplitTensor | None, width: int, context: SplitContext) -> list[SplitTensor] | None:
    """The packed projections of query, key and value, each with its own part of the rows."""
    if packed is None:
        return None
    found = []
    for index in range(3):
        cut = layouts.cut(packed.placement[0], index * width, (index + 1) * width, context.degree)
        if cut is None:
            return None
        factors, start, end = cut
        found.append(like(packed.local[start:end], layouts.replaced(packed.placement, 0, factors), context))
    return found


def _joint_mask(given: Keywords, query: Tensor, rows: int, context: SplitContext) -> Tensor | None:
    """The masks of positions and of padding as one that is added to scores, for this rank's heads."""
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None:
        mask = _added(mask, query.dtype)
        if mask.dim() == 3:
            mask = mask.view(rows, -1, *mask.shape[-2:])
            mask = context.part(mask, 1, 1)
        else:
            mask = context.copy_in(mask)
    joint: Tensor | None = mask
    if padding is not None:
        padding = _added(padding, query.dtype)[:, None, None, :]
        joint = padding if mask is None else mask + padding
    return joint


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add: minus infinity where a Boolean mask holds."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    return mask.to(dtype)


_NAMES = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k",
    "static_v", "average_attn_weights", "is_causal",
)  # fmt: skip
_DEFAULTS: Keywords = {
    "training": True, "key_padding_mask": None, "need_weights": True, "attn_mask": None, "static_k": None,
    "use_separate_proj_weight": False, "static_v": None, "is_causal": False,
}  # fmt: skip


@rule("baddbmm")
def _baddbmm(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "batch1", "batch2"), args, kwargs)
    first, second, base = given["batch1"], given["batch2"], given["input"]
    if not isinstance(first, SplitTensor) or not isinstance(second, SplitTensor) or first.shared_dim != 0:
        return NotImplemented
    if second.shared_dim != 0 or pattern_of(first) != pattern_of(second) or "out" in given:
        return NotImplemented
    if isinstance(base, SplitTensor):
        if base.shared_dim != 0 or pattern_of(base) != pattern_of(first):
            return NotImplemented
        added = base.local
    elif base.dim() == 3 and base.shape[0] != 1:
        added = context.part(base, 0, pattern_of(first).outer)
    else:
        added = context.copy_in(base)
    scales = {name: given[name] for name in ("beta", "alpha") if name in given}
    local = torch.baddbmm(added, first.local, second.local, **scales)
    return like(local, (first.placement[0], first.placement[1], second.placement[2]), context)
