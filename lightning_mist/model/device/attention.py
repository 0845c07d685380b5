"""Which attention CUDA runs, and what it keeps.

The rules are those of ``sdp::select_sdp_backend`` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp) and of
``scaled_dot_product_attention`` (aten/src/ATen/native/transformers/attention.cpp). cuDNN's attention, which torch
prefers on Hopper where cuDNN is recent enough, takes what flash attention takes and keeps the same tensors (query, key,
value, output, one 32-bit log-sum-exp per row), so it is not told apart.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_mist.model.device.kernels import Kernel, Target
from lightning_mist.model.device.library import fused_operators

aten = torch.ops.aten

Backend = Literal["flash", "efficient", "math"]

_HALF = (torch.float16, torch.bfloat16)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def attention_backend(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Backend:
    """The implementation that ``scaled_dot_product_attention`` picks on a CUDA device."""
    enabled: Any = torch.backends.cuda
    shapes = query.dim() == key.dim() == value.dim() == 4 and min(query.shape[2], key.shape[2]) > 0
    if not shapes or query.shape[0] != key.shape[0] or any(x.stride(-1) != 1 for x in (query, key, value)):
        return "math"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    takes_flash = enabled.flash_sdp_enabled() and (same_heads or enable_gqa)
    if takes_flash and _flash_runs(target, query, key, value, mask=mask, dropout=dropout, is_causal=is_causal):
        return "flash"
    if enabled.mem_efficient_sdp_enabled() and same_heads and _efficient_runs(target, query, key, value):
        return "efficient"
    return "math"


def _flash_runs(
    target: Target, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, dropout: float, is_causal: bool
) -> bool:
    width = query.shape[-1]
    if mask is not None or target.capability < (8, 0) or query.dtype not in _HALF:
        return False
    if not width == key.shape[-1] == value.shape[-1] or width > 256:
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: too little shared memory for backward
    is_small = (8, 6) <= target.capability <= (8, 9) or target.capability[0] == 12
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if is_small and needs_gradient and width > 192 and (dropout > 0 or width <= 224):
        return False
    return not is_causal or query.shape[2] == key.shape[2]


def _efficient_runs(target: Target, query: Tensor, key: Tensor, value: Tensor) -> bool:
    types = (torch.float32, *_HALF) if target.capability >= (8, 0) else (torch.float32, torch.float16)
    if query.dtype not in types:
        return False
    is_half = query.dtype in _HALF
    # minimum_gemm_alignment
    alignment = 4 if target.capability >= (8, 0) else 1
    if target.capability >= (8, 0) or (target.capability >= (7, 0) and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    same_width = query.shape[-1] == key.shape[-1]
    return bool(same_width and query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0)


def _attention(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    backend = attention_backend(
        target, query, key, value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
    )
    if backend == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    mask = _added(attn_mask, query.dtype)
    if backend == "math":
        given = {"scale": scale, "enable_gqa": enable_gqa}
        return aten._scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, None, **given)[0]
    if mask is not None:
        mask = _aligned(mask) if target.rounds else mask
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return _Efficient.apply(query, key, value, mask, target.rounds, is_causal)  # type: ignore[no-untyped-call]


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None) -> Tensor:
    """Heads of a width that is no multiple of 8 are padded, which copies them (attention.cpp, pad_last_dim)."""
    width = query.shape[-1]
    padded = [torch.nn.functional.pad(x, (0, -width % 8)) if width % 8 else x for x in (query, key, value)]
    used = width**-0.5 if scale is None else scale
    result: Tensor = aten._scaled_dot_product_flash_attention(*padded, dropout, is_causal, scale=used)[0]
    return result[..., :width] if width % 8 else result


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as numbers to add (attention.cpp, convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask.logical_not(), float("-inf"), zero)


def _aligned(mask: Tensor) -> Tensor:
    """A mask whose rows start at multiples of 8 elements (attention.cpp, preprocess_mask)."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _flash_backward(target: Target, grad: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """As mha_bwd in flash_attn/flash_api.cpp: softmax_d, dq_accum, and dk_expanded, dv_expanded for shared heads."""
    rows, heads, length, width = query.shape
    long = _round_up(length, 128 if target.rounds else 1)
    buffers = [
        grad.new_empty((rows, heads, long), dtype=torch.float32),
        grad.new_empty((rows, long, heads, _round_up(width, 32)), dtype=torch.float32),
    ]
    if key.shape[1] != heads:
        buffers += [grad.new_empty((rows, key.shape[2], heads, width)) for _ in range(2)]
    with torch._C._AutoDispatchBelowAutograd():
        result = aten._scaled_dot_product_flash_attention_backward(grad, query, key, *args, **kwargs)
    buffers.clear()
    return result


class _Efficient(torch.autograd.Function):
    """Attention by blocks, with a mask to add.

    Log-sum-exps come for 32 rows at a time; a value's width beyond 128 does not fit in registers and is summed up in a
    buffer (mem_eff_attention/kernel_forward.h, kAlignLSE and kNeedsOutputAccumulatorBuffer). Backward needs products of
    gradient and output, and sums of query gradients, in 32 bits (attention_backward.cu, delta and workspace;
    kernel_backward.h, kNeedsAccumGradQ, in tiles of 64).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rounds: bool, is_causal: bool
    ) -> Tensor:
        ctx.rounds, ctx.is_causal = rounds, is_causal
        length = query.shape[2] if any(ctx.needs_input_grad) else 0
        wide = value.shape[-1] > 128 and query.dtype in _HALF
        buffer = [query.new_empty((*query.shape[:3], value.shape[-1]), dtype=torch.float32)] if wide else []
        length = _round_up(length, 32 if rounds else 1)
        out, log_sum_exp, *state = fused_operators().fused_attention(query, key, value, mask, length, is_causal)
        buffer.clear()
        ctx.save_for_backward(query, key, value, mask, out, log_sum_exp, *state)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, mask, out, log_sum_exp, *_ = ctx.saved_tensors
        rows, heads, length, width = query.shape
        tile = 64 if ctx.rounds else 1
        buffers = [
            query.new_empty((rows, heads, length), dtype=torch.float32),
            query.new_empty((rows, heads, _round_up(length, tile), _round_up(width, 64)), dtype=torch.float32),
        ]
        result = fused_operators().fused_attention_backward(
            grads[0], query, key, value, mask, out, log_sum_exp, ctx.needs_input_grad[3], ctx.is_causal
        )
        buffers.clear()
        return (*result, None, None)


KERNELS = (
    Kernel(
        operator="scaled_dot_product_attention",
        compute=_attention,
        keeps="query, key, value, output and one 32-bit log-sum-exp per row and head; scores only where nothing fused "
        "runs; of dropout its seed",
        source="aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cpp",
    ),
    Kernel(
        operator="_scaled_dot_product_flash_attention_backward",
        compute=_flash_backward,
        keeps="buffers while it runs: 32-bit sums of query gradients, gradients of shared heads for every query head",
        source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd",
    ),
)
"""Attention on CUDA."""
