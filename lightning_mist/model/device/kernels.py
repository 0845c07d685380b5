"""Kernels that stand in for torch's own while a step is traced for another device: CUDA's attention and norms."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.attributes import SharedPatch, replaced

Key = Literal["AutogradCPU", "AutocastCPU"]
"""Where in torch's dispatcher a kernel stands: where autograd begins, or where autocast casts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device that a step is traced for.

    Attributes:
        rounds: Whether buffers are rounded up to whole tiles as kernels do. Where expressions in the length are sought,
            they are not: lengths of whole tiles, the usual ones, then come out exactly, others a little small.
    """

    torch_version: tuple[int, int]
    capability: tuple[int, int]
    rounds: bool = True


class Kernel(NamedTuple):
    """How an operator is computed."""

    operator: str  # its name in ``aten``, with the overload if that is not the default one
    compute: Callable[..., Any]
    key: Key = "AutogradCPU"


def overload_of(name: str) -> Any:
    """The operator of a name such as ``"softmax.int"``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _Own(threading.local):
    target: Target | None = None


class KernelRegistry:
    """Keeps kernels registered with torch while any thread wants them; each thread says whether they compute for it."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._kernels = kernels
        self._registered, self._own = SharedPatch(self._register), _Own()

    @contextmanager
    def in_force(self, target: Target) -> Iterator[None]:
        """Inside, fake tensors of this thread are computed as on a device."""
        with self._registered, replaced(self._own, target=target):
            yield

    @contextmanager
    def _register(self) -> Iterator[None]:
        make: Any = torch.library.Library
        library = make("aten", "IMPL")
        with warnings.catch_warnings():
            # torch says once that a kernel of its own is overridden, which is what is wanted here.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for kernel in self._kernels:
                library.impl(kernel.operator, self._call(kernel), kernel.key, with_keyset=True)
        yield
        library._destroy()

    def _call(self, kernel: Kernel) -> Callable[..., Any]:
        operator, compute = overload_of(kernel.operator), kernel.compute
        is_cast = kernel.key == "AutocastCPU"
        has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, kernel.key))

        def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
            target = self._own.target
            if is_cast or (target is not None and any(isinstance(leaf, FakeTensor) for leaf in args)):
                result = compute(target, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if has_parts and not is_cast:
                return operator.decompose(*args, **kwargs)
            return operator.redispatch(keys & after, *args, **kwargs)

        return call


# Operators with the results of CUDA's fused kernels, for fake tensors.
#
# On the CPU torch does not have these kernels, or composes them of others, or gives their results other types. They are
# defined in a package of their own, once a trace first asks for them; they compute shapes only.


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _statistics(x: Tensor, dims: int) -> Tensor:
    """One number of CUDA's accumulation type per normalised row."""
    kept = (*x.shape[: x.dim() - dims], *(1 for _ in range(dims)))
    return x.new_empty(kept, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _fused_norm(statistics: int, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The result, and so many statistics; the last argument says over how many dimensions."""
    return _like(x), *(_statistics(x, given[-1]) for _ in range(statistics))


def _fused_norm_backward(statistics: int, grad: Tensor, x: Tensor, *given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of the input, and of the weight and bias behind the statistics, as far as the last argument asks."""
    *affine, mask = given[statistics:]
    wanted = zip(mask, (x, *affine), strict=True)
    return tuple(_like(tensor) if needed and tensor is not None else None for needed, tensor in wanted)


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
    "fused_rms_norm(Tensor x, Tensor? weight, int dims) -> (Tensor, Tensor)": partial(_fused_norm, 1),
    "fused_rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, bool[2] mask) -> "
    "(Tensor?, Tensor?)": partial(_fused_norm_backward, 1),
    "fused_layer_norm(Tensor x, Tensor? weight, Tensor? bias, int dims) -> (Tensor, Tensor, Tensor)": partial(
        _fused_norm, 2
    ),
    "fused_layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "bool[3] mask) -> (Tensor?, Tensor?, Tensor?)": partial(_fused_norm_backward, 2),
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


# Norms, dropout and softmax as CUDA computes them.

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

_FUSED_RMS_NORM = (2, 9)
"""torch got a fused RMS norm on CUDA with pytorch/pytorch pull requests 153666 and 159317 (July 2025), after 2.8 had
been cut and before 2.9 (October 2025)."""


class _Norm(torch.autograd.Function):
    """A fused norm, by the name of its operators, of an input, its weight, and its bias if there may be one."""

    @staticmethod
    def forward(ctx: Any, name: str, dims: int, *tensors: Tensor | None) -> Tensor:
        y, *statistics = getattr(fused_operators(), name)(*tensors, dims)
        ctx.name, ctx.given = name, len(tensors)
        ctx.save_for_backward(*tensors, *statistics)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, mask = ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        (x, *affine), statistics = saved[: ctx.given], saved[ctx.given :]
        made = getattr(fused_operators(), f"{ctx.name}_backward")
        return (None, None, *made(grads[0], x, *statistics, *affine, mask))


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
    return _Norm.apply("fused_rms_norm", len(shape), x, weight)  # type: ignore[no-untyped-call]


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
    return _Norm.apply("fused_layer_norm", len(shape), x, weight, bias)  # type: ignore[no-untyped-call]


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


# What they keep for backward, and where in torch's sources (aten/src/ATen/native) that is written.
NORM_KERNELS = (
    # Input, weight and one 32-bit number per row, from torch 2.9 on; before, the upcast input too (layer_norm.cpp,
    # rms_norm_symint; pytorch/pytorch pull request 153666).
    Kernel("rms_norm", _rms_norm),
    # Input, weight and two 32-bit numbers per row, also of 16-bit inputs (cuda/layer_norm_kernel.cu, layer_norm_cuda).
    Kernel("layer_norm", _layer_norm),
    # A mask of one byte per element (Dropout.cpp, dropout; derivatives.yaml, native_dropout).
    Kernel("dropout", _dropout),
    # The result; no upcast copy of a 16-bit float input (SoftMax.cpp).
    Kernel("softmax.int", partial(_softmax, aten._softmax)),
    Kernel("log_softmax.int", partial(_softmax, aten._log_softmax)),
)
"""Norms, dropout and softmax on CUDA."""


# Which attention CUDA runs, and what it keeps.
#
# The rules are those of ``sdp::select_sdp_backend`` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp) and of
# ``scaled_dot_product_attention`` (aten/src/ATen/native/transformers/attention.cpp). cuDNN's attention, which torch
# prefers on Hopper where cuDNN is recent enough, takes what flash attention takes and keeps the same tensors (query,
# key, value, output, one 32-bit log-sum-exp per row), so it is not told apart.

Backend = Literal["flash", "efficient", "math"]


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


# In aten/src/ATen/native/transformers/cuda.
ATTENTION_KERNELS = (
    # Keeps query, key, value, output and one 32-bit log-sum-exp per row and head; scores only where nothing fused runs;
    # of dropout its seed (sdp_utils.cpp, attention.cpp).
    Kernel("scaled_dot_product_attention", _attention),
    # Takes buffers while it runs: 32-bit sums of query gradients, gradients of shared heads for every query head
    # (flash_attn/flash_api.cpp, mha_bwd).
    Kernel("_scaled_dot_product_flash_attention_backward", _flash_backward),
)
"""Attention on CUDA."""
