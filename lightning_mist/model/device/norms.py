"""Norms, dropout and softmax as CUDA computes them."""

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mist.model.device.kernels import Kernel, Target
from lightning_mist.model.device.library import fused_operators

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

_FUSED_RMS_NORM = (2, 9)
"""torch got a fused RMS norm on CUDA with pytorch/pytorch pull requests 153666 and 159317 (July 2025), after 2.8 had
been cut and before 2.9 (October 2025)."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        y, rstd = fused_operators().fused_rms_norm(x, weight, dims)
        ctx.save_for_backward(x, weight, rstd)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:2])
        return (*fused_operators().fused_rms_norm_backward(grads[0], x, rstd, weight, mask), None)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int) -> Tensor:
        y, mean, rstd = fused_operators().fused_layer_norm(x, weight, bias, dims)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        return (*fused_operators().fused_layer_norm_backward(grads[0], x, mean, rstd, weight, bias, mask), None)


def _is_channels_last(x: Tensor) -> bool:
    return (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()) or (
        x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()
    )


def _rms_norm(
    target: Target, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Fused where torch has it, with a weight of the input's type (layer_norm.cpp, rms_norm_symint)."""
    mismatch = weight is not None and weight.dtype != x.dtype
    if target.torch_version < _FUSED_RMS_NORM or mismatch or x.is_complex() or _is_channels_last(x):
        return NotImplemented
    _check(x, shape, "RMS norm")
    return _RMSNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]


def _layer_norm(
    target: Target,
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Only halves differ: the CPU keeps their mean and deviation in the input's type."""
    if x.dtype not in _HALF:
        return NotImplemented
    _check(x, shape, "layer norm")
    return _LayerNorm.apply(x, weight, bias, len(shape))  # type: ignore[no-untyped-call]


def _check(x: Tensor, shape: list[int], what: str) -> None:
    if tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
        raise RuntimeError(
            f"{what} over {list(shape)} of an input of shape {list(x.shape)}: its last sizes must be these"
        )


def _dropout(target: Target, x: Tensor, p: float, train: bool) -> Any:
    """Fused for probabilities between 0 and 1 (Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or not 0 < p < 1 or prod(x.shape) == 0:
        return NotImplemented
    return aten.native_dropout(x, p, True)[0]


def _softmax(fused: Any, target: Target, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """CUDA reads 16-bit floats and writes 32-bit ones in one go (SoftMax.cpp); brain floats are cast first."""
    return fused(x, dim, True) if x.dtype == torch.float16 and dtype == torch.float32 else NotImplemented


KERNELS = (
    Kernel(
        operator="rms_norm",
        compute=_rms_norm,
        keeps="input, weight and one 32-bit number per row, from torch 2.9 on; before, the upcast input too",
        source="aten/src/ATen/native/layer_norm.cpp, rms_norm_symint; pytorch/pytorch pull request 153666",
    ),
    Kernel(
        operator="layer_norm",
        compute=_layer_norm,
        keeps="input, weight and two 32-bit numbers per row, also of 16-bit inputs",
        source="aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda (acc_type)",
    ),
    Kernel(
        operator="dropout",
        compute=_dropout,
        keeps="a mask of one byte per element",
        source="aten/src/ATen/native/Dropout.cpp, dropout; derivatives.yaml, native_dropout",
    ),
    Kernel(
        operator="softmax.int",
        compute=partial(_softmax, aten._softmax),
        keeps="the result; no upcast copy of a 16-bit float input",
        source="aten/src/ATen/native/SoftMax.cpp, softmax",
    ),
    Kernel(
        operator="log_softmax.int",
        compute=partial(_softmax, aten._log_softmax),
        keeps="the result; no upcast copy of a 16-bit float input",
        source="aten/src/ATen/native/SoftMax.cpp, log_softmax",
    ),
)
"""Norms, dropout and softmax on CUDA."""
