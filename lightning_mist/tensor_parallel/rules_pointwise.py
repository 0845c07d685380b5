"""Rules for functions that treat every entry, or every row, by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_mist.tensor_parallel import layout as layouts
from lightning_mist.tensor_parallel.random import own_random
from lightning_mist.tensor_parallel.rules import bind, dims_from_right, like, pattern_of, rule
from lightning_mist.tensor_parallel.tensor import SplitContext, SplitTensor

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

_POINTWISE = (
    "add", "mul", "sub", "rsub", "div", "true_divide", "__add__", "__radd__", "__mul__", "__rmul__", "__sub__",
    "__rsub__", "__truediv__", "__rtruediv__", "__neg__", "__pow__", "__rpow__", "__iadd__", "__imul__", "__isub__",
    "__itruediv__", "add_", "sub_", "mul_", "div_", "neg", "negative", "abs", "__abs__", "pow", "rsqrt", "sqrt", "exp",
    "expm1", "log", "log1p", "log2", "square", "reciprocal", "tanh", "sigmoid", "relu", "relu_", "relu6", "gelu",
    "silu", "mish", "elu", "leaky_relu", "hardswish", "hardtanh", "softplus", "logsigmoid", "erf", "sin", "cos",
    "clamp", "clamp_min", "clamp_max", "clip", "where", "masked_fill", "masked_fill_", "lerp", "addcmul", "addcdiv",
    "maximum", "minimum", "nan_to_num", "sign", "round", "floor", "ceil", "isnan", "isinf", "isfinite", "logical_not",
    "logical_and", "logical_or", "__and__", "__or__", "__invert__", "eq", "ne", "lt", "le", "gt", "ge", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "zeros_like", "ones_like", "full_like", "empty_like",
    "float_power", "remainder", "softsign", "selu", "celu", "hardsigmoid", "threshold", "xlogy", "atan", "cosh", "sinh",
)  # fmt: skip
_CASTS = (
    "to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type", "type_as", "contiguous", "clone",
    "detach", "cpu", "cuda", "alias", "requires_grad_",
)  # fmt: skip


@rule(*_CASTS)
def _cast(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    if func.__name__ == "requires_grad_" or not isinstance(args[0], SplitTensor):
        others = [item.local if isinstance(item, SplitTensor) else item for item in args]
        return NotImplemented if func.__name__ == "requires_grad_" else func(*others, **kwargs)
    others = [item.local if isinstance(item, SplitTensor) else item for item in args[1:]]
    return like(func(args[0].local, *others, **kwargs), args[0].placement, context)


@rule(*_POINTWISE)
def _pointwise(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    return pointwise(func, args, kwargs, context)


def pointwise(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    """A function of aligned entries: every rank computes those of its part."""
    if "out" in kwargs:
        return NotImplemented
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    split = [leaf for leaf in tensors if isinstance(leaf, SplitTensor)]
    place, pattern = dims_from_right(split[0]), pattern_of(split[0])
    if any(dims_from_right(leaf) != place or pattern_of(leaf) != pattern for leaf in split[1:]):
        return NotImplemented
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in tensors))  # type: ignore[no-untyped-call]
    is_in_place = (func.__name__.endswith("_") and not func.__name__.endswith("__")) or func.__name__.startswith("__i")
    is_in_place = is_in_place and func.__name__ != "__invert__"
    if is_in_place and not isinstance(args[0], SplitTensor):
        return NotImplemented
    whole_size = shape[place]

    def local(leaf: Any) -> Any:
        if isinstance(leaf, SplitTensor):
            return leaf.local
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() >= -place and leaf.shape[place] == whole_size != 1:
            return context.part(leaf, leaf.dim() + place, pattern.outer)
        return context.copy_in(leaf)

    args, kwargs = tree_unflatten([local(leaf) for leaf in leaves], structure)
    result = func(*args, **kwargs)
    longest = max(split, key=lambda leaf: len(leaf.placement))
    return like(result, layouts.broadcast(longest.placement, shape), context)


@rule("softmax", "log_softmax", "_softmax", "cumsum", "sort", "flip")
def _along_one(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "dim"), args, kwargs)
    tensor, dim = given["input"], given.get("dim")
    if not isinstance(dim, int) or dim % len(tensor.placement) == tensor.shared_dim or func.__name__ == "sort":
        return NotImplemented
    return like(func(tensor.local, *args[1:], **kwargs), tensor.placement, context)


@rule("mean", "sum", "amax", "amin", "norm", "var", "std", "logsumexp", "prod", "all", "any")
def _reduction(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    names = ("input", "p", "dim", "keepdim") if func.__name__ == "norm" else ("input", "dim", "keepdim")
    given = bind(names, args, kwargs, keepdim=False)
    tensor, dims, keep = given["input"], given.get("dim"), given.get("keepdim")
    if dims is None or isinstance(dims, bool) or not isinstance(keep, bool) or not isinstance(tensor, SplitTensor):
        return NotImplemented
    rank = len(tensor.placement)
    gone = {dim % rank for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    if tensor.shared_dim in gone or not gone:
        return NotImplemented
    layout = tuple(
        ((1, False),) if dim in gone else factors
        for dim, factors in enumerate(tensor.placement)
        if keep or dim not in gone
    )
    return like(func(tensor.local, *args[1:], **kwargs), layout, context)


@rule("layer_norm", "rms_norm")
def _norm(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "normalized_shape"), args, kwargs)
    tensor, sizes = given["input"], given["normalized_shape"]
    if not isinstance(tensor, SplitTensor) or tensor.shared_dim >= len(tensor.placement) - len(sizes):
        return NotImplemented
    args = tuple(item.local if item is tensor else context.copy_in(item) for item in args)
    kwargs = {key: tensor.local if item is tensor else context.copy_in(item) for key, item in kwargs.items()}
    return like(func(*args, **kwargs), tensor.placement, context)


@rule("dropout", "dropout_", "native_dropout", "alpha_dropout", "feature_alpha_dropout")
def _dropout(func: Callable[..., Any], args: Arguments, kwargs: Keywords, context: SplitContext) -> Any:
    given = bind(("input", "p", "training", "inplace"), args, kwargs, training=True)
    tensor = given["input"]
    if not isinstance(tensor, SplitTensor) or func.__name__ not in ("dropout", "dropout_"):
        return NotImplemented
    if not given["training"]:
        return tensor
    with own_random(tensor.local, context.group):
        local = func(tensor.local, *args[1:], **{key: item for key, item in kwargs.items() if key != "input"})
    return like(local, tensor.placement, context)
