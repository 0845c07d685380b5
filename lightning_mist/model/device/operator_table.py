"""Operators as another device runs them, for traces on fake tensors of the host.

A trace runs on the CPU, whatever the module will train on, and torch picks other operators there: it keeps the upcast
input of an RMS norm, dropout masks in the type of the activation, whole attention scores wherever dropout is asked for,
and casts other things under autocast. A :class:`DeviceOperators` table names what differs, each with its source, and
:meth:`DeviceOperators.installed` lets fake tensors go the way of the target device.

The replacements are kernels registered with torch's dispatcher, below every Python name that a function has
(``torch.x``, ``torch.nn.functional.x``, ``torch._C._nn.x``, a name imported long before) and in force while a
checkpointed block is recomputed, where function modes are not. They act on fake tensors of the thread that installed
them; everything else computes as always.

Equal on both devices, so not in the table: linear layers, embeddings, GELU, SiLU, cross entropy, group and batch norms
(but for vectors of one number per channel). Not known: what cuDNN's recurrent layers and workspaces need.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_mist.attributes import replaced
from lightning_mist.model.device.kernels import (
    ATTENTION_KERNELS,
    NORM_KERNELS,
    Kernel,
    KernelRegistry,
    Target,
    overload_of,
)

# What CUDA's autocast casts, for fake tensors on the CPU, whose autocast has other lists.
#
# Which operators are on CUDA's lists is read from the installed torch, which registers its CUDA casts in every build;
# how each is cast is in the tables below, from torch's header ``ATen/autocast_mode.h`` (``AT_FORALL_*``). Operators on
# the CPU's list alone are cast there to 32 bits; while a step is traced for CUDA they are not.


FP32 = frozenset(
    (
        "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
        "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
        "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
        "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
        "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
        "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
        "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
        "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
        "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
        "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    )
)  # fmt: skip
"""Computed in 32 bits: ``AT_FORALL_FP32``."""

FP32_RESULT = frozenset(
    (
        "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
        "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
    )
)  # fmt: skip
"""Given 32 bits as the type of the result, unless the caller named one: ``AT_FORALL_FP32_SET_OPT_DTYPE``."""

APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Called as the overload that takes a type, with 32 bits: ``AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE``."""

PROMOTE = frozenset(
    (
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
        "scatter_add",
    )
)  # fmt: skip
"""Computed in the widest type among the inputs: ``AT_FORALL_PROMOTE``."""

LOWER = frozenset(
    (
        "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
        "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution",
        "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
        "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
        "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
        "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    )
)  # fmt: skip
"""Computed in the lower precision: ``AT_FORALL_LOWER_PRECISION_FP``."""

_SAME_RESULT = frozenset(
    (
        "conv1d.padding", "conv2d.padding", "conv3d.padding", "_addmm_activation", "_native_multi_head_attention",
        "mkldnn_rnn_layer", "cat", "stack", "index_copy",
    )
)  # fmt: skip
"""On the CPU's list alone, but computed in the same types without it: made of listed ones, or promoting anyhow."""


def _registered(key: str) -> frozenset[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _outside_autocast(operator: Any, args: Any, kwargs: Any, dtype: torch.dtype | None = None) -> Any:
    """Run an operator uncast, or with all that can be cast in one type."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        if dtype is not None:
            args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _eligible(leaf) else leaf, (args, kwargs))
        return operator(*args, **kwargs)


def _lower(operator: Any, args: Any, kwargs: Any) -> Any:
    return _outside_autocast(operator, args, kwargs, torch.get_autocast_dtype("cpu"))


_fp32 = partial(_outside_autocast, dtype=torch.float32)


def _promote(operator: Any, args: Any, kwargs: Any) -> Any:
    types = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _eligible(leaf)}
    wide = torch.float32 if torch.float32 in types or len(types) > 1 else next(iter(types), torch.float32)
    return _outside_autocast(operator, args, kwargs, wide)


def _fp32_result(operator: Any, args: Any, kwargs: Any) -> Any:
    place = next(index for index, item in enumerate(operator._schema.arguments) if item.name == "dtype")
    is_keyword = operator._schema.arguments[place].kwarg_only
    given = kwargs.get("dtype") if is_keyword or len(args) <= place else args[place]
    if given is None and _eligible(args[0]):
        kwargs = {**kwargs, "dtype": torch.float32}
        args = args if is_keyword else args[:place]
    return _outside_autocast(operator, args, kwargs)


def _appended(longer: Any, operator: Any, args: Any, kwargs: Any) -> Any:
    if not _eligible(args[0]):
        return _outside_autocast(operator, args, kwargs)
    defaults = [item.default_value for item in operator._schema.arguments]
    return _outside_autocast(longer, (*args, *defaults[len(args) :]), {**kwargs, "dtype": torch.float32})


def _left_to_torch(operator: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented


def _rule(name: str) -> Callable[..., Any] | None:
    if name in APPENDED:
        return partial(_appended, overload_of(APPENDED[name]))
    rules = ((LOWER, _lower), (FP32, _fp32), (FP32_RESULT, _fp32_result), (PROMOTE, _promote))
    return next((rule for names, rule in rules if name in names), None)


def kernels() -> tuple[Kernel, ...]:
    """The casts that differ between the CPU and CUDA in the installed torch."""
    here, there = _registered("AutocastCPU"), _registered("AutocastCUDA")
    return (
        *(_kernel(name, rule) for name in sorted(there - here) if (rule := _rule(name)) is not None),
        # What the CPU casts to 32 bits stays so for threads that do not trace.
        *(_kernel(name, _fp32_result, elsewhere=_fp32) for name in sorted(here & there & FP32_RESULT)),
        *(_kernel(name, _left_to_torch, elsewhere=_fp32) for name in sorted(here - there - _SAME_RESULT)),
    )


def _kernel(name: str, rule: Callable[..., Any], elsewhere: Callable[..., Any] = _left_to_torch) -> Kernel:
    operator = overload_of(name)

    def compute(target: Target | None, *args: Any, **kwargs: Any) -> Any:
        return (elsewhere if target is None else rule)(operator, args, kwargs)

    return Kernel(name, compute, key="AutocastCPU")


@contextmanager
def named(kind: str) -> Iterator[None]:
    """Inside, ``torch.autocast(kind)`` casts fake tensors on the CPU.

    The class itself is changed: user code refers to it by several names, and torch knows no other way in.
    """
    cls = torch.amp.autocast_mode.autocast
    original = cls.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == kind:
            device_type, dtype = "cpu", torch.get_autocast_dtype(kind) if dtype is None else dtype
        original(self, device_type, dtype, enabled, cache_enabled)

    with replaced(cls, __init__=init):
        yield


KINDS = ("cpu", "cuda")
"""Kinds of device that there is a table for."""

_UNKNOWN_CAPABILITY = (8, 0)
"""Compute capability where none is given: that of the A100, from which on all of torch's attentions run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOperators:
    """How operators differ on one kind of device."""

    name: str
    target: Target
    kernels: tuple[Kernel, ...]  # what is replaced

    @contextmanager
    def installed(self, *, rounds: bool = True) -> Iterator[None]:
        """Inside, fake CPU tensors of this thread are computed with these operators.

        ``torch.autocast`` follows: a step may ask for the target device's autocast by name, which torch ignores where
        that device is not at hand.
        """
        if not self.kernels:
            yield
            return
        with _cuda().in_force(replace(self.target, rounds=rounds)), named(self.name):
            yield


def device_operators(
    kind: str, torch_version: str | None = None, *, capability: tuple[int, int] | None = None
) -> DeviceOperators:
    """The table for a kind of device.

    Args:
        kind: ``"cpu"`` (nothing differs) or ``"cuda"``.
        torch_version: The torch that will train there; the installed one by default. Decides which kernels are fused;
            what autocast casts is always the installed one's.
        capability: CUDA compute capability; 8.0 where it is not known. Decides which attention can run.

    Raises:
        ValueError: If there is no table for the kind.
    """
    if kind not in KINDS:
        raise ValueError(f"device_kind = {kind!r}: operators are known for {' and '.join(KINDS)}; use one of them")
    version = (torch_version or torch.__version__).partition("+")[0]
    major, minor = (int(part) for part in version.split(".")[:2])
    target = Target(torch_version=(major, minor), capability=capability or _UNKNOWN_CAPABILITY)
    kernels = _kernels() if kind == "cuda" else ()
    return DeviceOperators(name=kind, target=target, kernels=kernels)


@cache
def _kernels() -> tuple[Kernel, ...]:
    return (*ATTENTION_KERNELS, *NORM_KERNELS, *kernels())


@cache
def _cuda() -> KernelRegistry:
    return KernelRegistry(_kernels())
