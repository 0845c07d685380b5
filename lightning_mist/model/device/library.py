"""Operators with the results of CUDA's fused kernels, for fake tensors.

On the CPU torch does not have these kernels, or composes them of others, or gives their results other types. They are
defined in a package of their own, once a trace first asks for them; they compute shapes only.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _statistics(x: Tensor, dims: int) -> Tensor:
    """One number of CUDA's accumulation type per normalised row."""
    kept = (*x.shape[: x.dim() - dims], *(1 for _ in range(dims)))
    return x.new_empty(kept, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _fused_rms_norm(x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    return _like(x), _statistics(x, dims)


def _fused_rms_norm_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, mask: list[bool]) -> Any:
    return _wanted(mask, x, weight)


def _fused_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int) -> Any:
    return _like(x), _statistics(x, dims), _statistics(x, dims)


def _fused_layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, mask: list[bool]
) -> Any:
    return _wanted(mask, x, weight, bias)


def _wanted(mask: list[bool], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(_like(t) if needed and t is not None else None for needed, t in zip(mask, tensors, strict=True))


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, length: int, is_causal: bool = False
) -> Any:
    """Output with heads side by side, one 32-bit log-sum-exp for each of ``length`` rows, and a generator's state."""
    rows, heads, queries, _ = query.shape
    out = query.new_empty((rows, queries, heads, value.shape[-1])).transpose(1, 2)
    state = (query.new_empty((), dtype=torch.long) for _ in range(2))
    return out, query.new_empty((rows, heads, length), dtype=torch.float32), *state


def _fused_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    bias_mask: bool,
    is_causal: bool = False,
) -> Any:
    made = (tensor.transpose(1, 2) for tensor in (query, key, value))
    gradients = (tensor.new_empty(tensor.shape).transpose(1, 2) for tensor in made)
    return (*gradients, bias.new_empty(bias.shape) if bias_mask and bias is not None else None)


_KERNELS: dict[str, Callable[..., Any]] = {
    "fused_rms_norm(Tensor x, Tensor? weight, int dims) -> (Tensor, Tensor)": _fused_rms_norm,
    "fused_rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, bool[2] mask) -> "
    "(Tensor?, Tensor?)": _fused_rms_norm_backward,
    "fused_layer_norm(Tensor x, Tensor? weight, Tensor? bias, int dims) -> (Tensor, Tensor, Tensor)": _fused_layer_norm,
    "fused_layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "bool[3] mask) -> (Tensor?, Tensor?, Tensor?)": _fused_layer_norm_backward,
    "fused_attention(Tensor query, Tensor key, Tensor value, Tensor? bias, int length, bool is_causal=False) -> "
    "(Tensor, Tensor, Tensor, Tensor)": _fused_attention,
    "fused_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor out, "
    "Tensor log_sum_exp, bool bias_mask, bool is_causal=False) -> "
    "(Tensor, Tensor, Tensor, Tensor?)": _fused_attention_backward,
}
"""Schema to kernel."""


@cache
def _library() -> Any:
    """Keeps the operators: they go when their library does."""
    make: Any = torch.library.Library
    library = make("lightning_mist", "DEF")
    for schema, kernel in _KERNELS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "Meta")
    return library


def fused_operators() -> Any:
    """The operators, by name."""
    _library()
    return torch.ops.lightning_mist
