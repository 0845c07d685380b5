"""Rules for what happens element by element: arithmetic, comparisons, activations, dropout, conversions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.devices import ops_of
from lightning_mist.plan.calls import leaves_of
from lightning_mist.tensor_parallel.parts import bind, operand
from lightning_mist.tensor_parallel.shard_layout import Layout, broadcast
from lightning_mist.tensor_parallel.tensor import RULES, SplitContext, SplitTensor, rule, whole, wrap

_ARITHMETIC = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "pow",
    "float_power", "remainder", "fmod", "rsub", "neg", "negative", "positive", "abs", "absolute", "reciprocal",
    "sqrt", "rsqrt", "square", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf", "erfc", "erfinv", "expit", "sigmoid", "logit", "floor",
    "ceil", "round", "trunc", "frac", "sign", "maximum", "minimum", "fmax", "fmin", "clamp", "clip", "clamp_min",
    "clamp_max", "nan_to_num", "lerp", "addcmul", "addcdiv", "where", "masked_fill", "hypot", "logaddexp", "xlogy",
    "sinc", "copysign", "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__", "__floordiv__",
    "__rfloordiv__", "__add__", "__sub__", "__mul__", "__truediv__", "__div__", "__pow__", "__mod__", "__rmod__",
    "__neg__", "__pos__", "__abs__",
)  # fmt: skip
_LOGIC = (
    "eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal", "isnan", "isinf",
    "isfinite", "isclose", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_not", "bitwise_xor", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__",
    "__xor__", "__invert__", "__rand__", "__ror__", "__rxor__",
)  # fmt: skip
_ACTIVATIONS = (
    "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardswish", "hardsigmoid",
    "hardtanh", "softplus", "softsign", "logsigmoid", "tanhshrink", "hardshrink", "softshrink", "threshold",
    "log_sigmoid",
)  # fmt: skip
_CONVERSIONS = (
    "to", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "contiguous", "clone", "detach",
    "cpu", "cuda", "type", "zeros_like", "ones_like", "full_like", "empty_like", "alias", "requires_grad_",
)  # fmt: skip
_RANDOM = ("dropout", "alpha_dropout", "feature_alpha_dropout", "rand_like", "randn_like", "bernoulli")
_IN_PLACE = (
    "add_", "sub_", "mul_", "div_", "pow_", "neg_", "abs_", "exp_", "sqrt_", "rsqrt_", "square_", "tanh_", "sigmoid_",
    "relu_", "clamp_", "clamp_min_", "clamp_max_", "masked_fill_", "zero_", "fill_", "copy_", "nan_to_num_", "addcmul_",
    "addcdiv_", "lerp_", "logical_and_", "logical_or_", "logical_not_", "eq_", "ne_", "detach_",
    "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__iand__", "__ior__",
)  # fmt: skip


def common_layout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
    """How the result of broadcasting is shared out: like the largest split operand."""
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    main = max(
        (leaf.placement for leaf in tensors if isinstance(leaf, SplitTensor)), key=lambda found: prod(found.sizes)
    )
    sizes = broadcast(*(tuple(leaf.shape) for leaf in tensors))
    return Layout(sizes, len(sizes) + main.from_end, main.outer)


def on_parts(context: SplitContext, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> Any:
    """Arguments as one rank computes with them."""

    def convert(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(leaf, Tensor) for leaf in value):
            return type(value)(convert(leaf) for leaf in value)
        return operand(context, value, layout)

    return tuple(convert(value) for value in args), {key: convert(value) for key, value in kwargs.items()}


@rule(*_ARITHMETIC, *_LOGIC, *_ACTIVATIONS)
def _elementwise(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("out") is not None or (func in (torch.where, Tensor.where) and len(args) + len(kwargs) == 1):
        return NotImplemented
    layout = common_layout(args, kwargs)
    args, kwargs = on_parts(context, args, kwargs, layout)
    return wrap(func(*args, **kwargs), layout, context)


@rule(*_CONVERSIONS)
def _conversion(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another type, device or place in memory; another tensor given says only which."""
    tensor = args[0]
    if func == Tensor.type and len(args) + len(kwargs) == 1:
        return func(tensor.local)
    args = tuple(value.local if isinstance(value, SplitTensor) else value for value in args)
    kwargs = {key: value.local if isinstance(value, SplitTensor) else value for key, value in kwargs.items()}
    result = func(*args, **kwargs)
    return wrap(result, tensor.placement, context) if isinstance(tensor, SplitTensor) else result


@rule(*_RANDOM)
def _random(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("generator") is not None or not isinstance(args[0], SplitTensor):
        return NotImplemented
    given = bind(("input", "p", "training"), args, kwargs, p=0.5, training=True)
    is_idle = "dropout" in func.__name__ and (not given.get("train", given["training"]) or given["p"] == 0)
    tensor = args[0]
    with nullcontext() if is_idle else own_stream(tensor.local, context.rank):
        result = func(tensor.local, *args[1:], **kwargs)
    return wrap(result, tensor.placement, context)


@rule(*_IN_PLACE)
def _in_place(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, SplitTensor):
        return func(target, *whole(args[1:]), **whole(kwargs))
    if common_layout(args, kwargs).sizes != target.placement.sizes:
        return NotImplemented
    rest, kwargs = on_parts(context, args[1:], kwargs, target.placement)
    func(target.local, *rest, **kwargs)
    return target


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def _new(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor of which every rank has the whole; the old one says its type only."""
    return func(args[0].local, *args[1:], **kwargs)


@rule("is_floating_point", "is_complex", "element_size", "get_device", "is_signed", "is_inference")
def _question(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is true of a part as of the whole."""
    if len(args) + len(kwargs) > 1:
        return NotImplemented
    return func(args[0].local)


_PROPERTIES = (
    "layout", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized",
    "is_mkldnn", "is_nested", "is_xla", "is_maia", "is_mtia", "is_hpu", "is_ipu", "is_vulkan", "itemsize",
    "retains_grad",
    "_version", "output_nr", "_backward_hooks", "name", "names",
)  # fmt: skip


for _name in _PROPERTIES:
    if hasattr(Tensor, _name):
        RULES[getattr(Tensor, _name).__get__] = _question


@rule("numel", "nelement", "stride", "is_contiguous", "is_nonzero", "is_same_size")
def _metadata(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is said of the whole's shape, as if it were contiguous."""
    if func in (torch.is_nonzero, Tensor.is_nonzero):
        return NotImplemented
    plain = tuple(torch.empty(value.shape, device="meta") if isinstance(value, Tensor) else value for value in args)
    return func(*plain, **kwargs)


# Random numbers on parts.
#
# Values that all ranks hold whole draw from the common stream of the device's default generator, which is equal on all
# ranks. A part draws from a stream of its own, whose seed comes from the common stream and the rank: two ranks never
# repeat each other, the common stream moves on alike everywhere, and a recomputation that restores the generators gets
# the same numbers again.


_MASK = (1 << 64) - 1
# CUDA's generator counts its offset in steps of 4 (ATen/cuda/CUDAGeneratorImpl.cpp).
_CUDA_STEP = 4


def mix(value: int, rank: int) -> int:
    """A seed for a rank from a common value: SplitMix64 (Steele, Lea, Flood 2014) after rank + 1 steps."""
    value = (value + (rank + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) & (_MASK >> 1)


@contextmanager
def own_stream(part: Tensor, rank: int) -> Iterator[None]:
    """Inside, the default generator of a part's device gives numbers that are this rank's alone."""
    if isinstance(part, FakeTensor) or part.is_meta:
        yield
        return
    generator = ops_of(part.device).generator()
    if generator is None:
        generator = torch.default_generator
        seed = int(torch.randint(1 << 62, (), device="cpu").item())
        after = generator.get_state()
    else:
        # Seed and place in the stream are on the host: nothing here waits for the device.
        offset = generator.get_offset()
        seed = mix(generator.initial_seed() & _MASK, 0) ^ offset
        generator.set_offset(offset + _CUDA_STEP)
        after = generator.get_state()
    generator.manual_seed(mix(seed, rank))
    try:
        yield
    finally:
        generator.set_state(after)
