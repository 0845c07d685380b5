"""What single operators are and cost: kinds of work, FLOPs, bytes; and products with parameters as linear layers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lightning_mist.model.fakes import storage_of
from lightning_mist.model.spec import OperatorKind
from lightning_mist.optimizers import tensors_within
from lightning_mist.plan.calls import leaves_of

_INDEX = (
    "embedding", "_embedding_bag", "index", "_index_put_impl", "_unsafe_index", "gather", "scatter", "take",
    "masked_select", "masked_scatter", "one_hot", "nonzero",
)  # fmt: skip
_COPY = (
    "copy", "_to_copy", "clone", "contiguous", "cat", "stack", "repeat", "fill", "zero", "zeros", "ones", "full",
    "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "slice_backward", "slice_scatter",
    "select_backward", "select_scatter", "as_strided_scatter", "unfold_backward", "constant_pad_nd", "roll", "flip",
    "tril", "triu", "split_with_sizes_copy", "_foreach_copy", "_foreach_zero",
)  # fmt: skip
_REDUCTION = (
    "sum", "mean", "amax", "amin", "max", "min", "aminmax", "prod", "var", "std", "var_mean", "std_mean", "any", "all",
    "argmax", "argmin", "topk", "sort", "cumsum", "cumprod", "logsumexp", "norm", "linalg_vector_norm", "_foreach_norm",
    "dot", "mv", "addmv", "mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "bincount",
)  # fmt: skip
_NAMES: dict[str, OperatorKind] = {
    **dict.fromkeys(_INDEX, "index"),
    **dict.fromkeys(_COPY, "copy"),
    **dict.fromkeys(_REDUCTION, "reduction"),
}

_PARTS: tuple[tuple[str, OperatorKind], ...] = (
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("conv2d", "convolution"),
    ("normal", "elementwise"),  # random numbers, no norms
    ("embedding", "index"),
    ("index_", "index"),
    ("scatter_", "index"),
    ("_norm", "reduction"),
    ("softmax", "reduction"),
    ("nll_loss", "reduction"),
    ("_pool", "reduction"),
    ("linear_cross_entropy", "reduction"),
)
"""Parts of names that tell a whole family, forward and backward; looked for in this order."""


@cache
def _family(operator: Any) -> OperatorKind:
    name: str = operator._overloadpacket.__name__
    plain = name.removesuffix("_backward").rstrip("_")
    exact = _NAMES.get(name.rstrip("_")) or _NAMES.get(plain)
    if exact is not None:
        return exact
    for part, kind in _PARTS:
        if part in name:
            return kind
    return "matmul" if operator._overloadpacket in flop_registry else "elementwise"


def kind_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorKind:
    """The kind of an operator that computes."""
    kind = _family(operator)
    if kind != "attention":
        return kind
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    return "causal_attention" if given.get("is_causal") else kind


# What one operator costs: floating-point operations and bytes moved, from its arguments and its result.
#
# Works on real and on fake tensors alike, since only shapes are looked at.


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backward: bool) -> int:
    """Two products per score: ``q k^T`` and ``p v``; a causal mask is not counted as saving, as torch does.

    In backward five: scores again, and the gradients of value, probabilities, query and key.
    """
    batch, heads, length, width = map(int, query.shape)
    of_width, of_value = (3, 2) if backward else (1, 1)
    return 2 * batch * heads * length * int(key.shape[2]) * (of_width * width + of_value * int(value.shape[3]))


# torch's registry has the CUDA kernels of fused attention but not the CPU's, and its own formulas refuse, in older
# releases, queries that share keys and values; the counts are those of torch.utils.flop_counter.sdpa_flop_count and
# sdpa_backward_flop_count.
_ATTENTION = frozenset(
    (
        "fused_attention", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    )
)  # fmt: skip

# Operators that only make room, such as the buffers of a fused kernel.
_ROOM = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})

# Operators that read only the rows they are asked for, so that the size of the table does not count.
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index"})


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or result: bare, or in lists and tuples of any depth."""
    yield from (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))


def narrow_type(tensors: Iterable[torch.Tensor], *, floating: bool) -> str:
    """The first type of 8 bits (or 4) among tensors of more than one number; empty if there is none.

    Args:
        floating: Whether only floating-point types count, and not integers.
    """
    for tensor in tensors_within(list(tensors)):
        dtype = tensor.dtype
        is_narrow = dtype.itemsize == 1 and dtype is not torch.bool and tensor.numel() > 1
        if is_narrow and (dtype.is_floating_point or not floating):
            return str(dtype).removeprefix("torch.")
    return ""


def computes(operator: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an operator reads or writes elements, rather than only making another view of them."""
    if operator.is_view:
        return False
    if operator._schema.is_mutable or not outputs or not inputs:
        return True
    keys = {storage_of(tensor) for tensor in inputs}
    return any(storage_of(tensor) not in keys for tensor in outputs)


def flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
    """Floating-point operations by torch's own formulas; a multiply-add is two, element-wise operators are none."""
    packet = operator._overloadpacket
    if packet.__name__ in _ATTENTION:
        return _attention_flops(*args[:3], backward=False)
    if packet.__name__.removesuffix("_backward") in _ATTENTION:
        return _attention_flops(*args[1:4], backward=True)
    formula: Callable[..., Any] | None = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operator writes to, by its schema."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))


def moved_bytes(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> int:
    """Bytes read plus bytes written by an operator that computes.

    Every distinct input is read once and every result or written argument is written once; table look-ups read as much
    as they return, and what only makes room moves nothing.
    """
    if operator._overloadpacket.__name__ in _ROOM:
        return 0
    reads, lookup = {id(tensor): tensor for tensor in inputs}, 0
    if operator._overloadpacket.__name__ in _LOOKUPS:
        reads.pop(id(args[0]), None)
        lookup = sum(map(_size, outputs))
    writes = {id(tensor): tensor for tensor in outputs}
    if operator._schema.is_mutable:
        writes.update((id(tensor), tensor) for tensor in written(operator, args, kwargs))
    return lookup + sum(map(_size, reads.values())) + sum(map(_size, writes.values()))


# Linear layers as they are called: ``linear``, ``addmm`` and ``matmul`` with a parameter, whatever module does it.

_MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_ADDMMS = (torch.addmm, Tensor.addmm)


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One product with a matrix of parameters."""

    input: Tensor
    weight: Tensor  # the parameter; ``rows`` may be part of it
    bias: Tensor | None  # what is added, if the call itself adds it
    output_dim: int  # the dimension of the parameter along which outputs lie
    first_row: int  # the first of its entries along that dimension that takes part
    rows: int  # how many do

    @property
    def input_dim(self) -> int:
        """The dimension of the parameter along which inputs lie."""
        return 1 - self.output_dim

    @property
    def width(self) -> int:
        """Number of inputs."""
        return self.weight.shape[self.input_dim]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return (*self.input.shape[:-1], self.rows)


def operands_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any, int] | None:
    """Input, weight and bias of a product, and the dimension of the weight along which outputs lie; None of others."""
    if func is functional.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
        return given["input"], given["weight"], given.get("bias"), 0
    if func in _ADDMMS and len(args) >= 3:
        return args[1], args[2], args[0], 1
    return (args[0], args[1], None, 1) if func in _MATMULS and len(args) >= 2 else None


def read_linear(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Mapping[int, Tensor]
) -> LinearCall | None:
    """A call of a torch function as a linear layer on one of the parameters by ``id``, None if it is none."""
    given, weight, bias, output_dim = operands_of(func, args, kwargs) or (None, None, None, 0)
    if func is not functional.linear and kwargs:
        return None  # it is scaled
    if not isinstance(weight, Tensor) or not isinstance(given, Tensor) or weight.dim() != 2 or not given.dim():
        return None
    base, first = weight, 0
    if id(weight) not in parameters:
        if weight._base is None or id(weight._base) not in parameters or weight._base.dim() != 2:
            return None
        base = weight._base
        upright = weight if weight.stride() == base.stride() else weight.t()
        if upright.stride() != base.stride() or upright.shape[1] != base.shape[1] or not base.stride(0):
            return None
        output_dim = output_dim if upright is weight else 1 - output_dim
        first = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
        if output_dim != 0 and upright.shape != base.shape:
            return None
        rows = upright.shape[output_dim]
    else:
        rows = weight.shape[output_dim]
    call = LinearCall(given, base, bias if isinstance(bias, Tensor) else None, output_dim, first, rows)
    return call if given.shape[-1] == call.width else None


class LinearMode(TorchFunctionMode):
    """Inside, products with parameters are answered by :meth:`answer`, those inside of multi-head attention too."""

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.parameters = parameters

    def answer(self, call: LinearCall, compute: Callable[[], Any]) -> Any:
        """What the product shall be; ``compute`` calculates it."""
        return compute()

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Any other call."""
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return seen_through(func)(*args, **given)
        call = read_linear(func, args, given, self.parameters)
        if call is None:
            return self.other(func, args, given)
        return self.answer(call, lambda: func(*args, **given))


def seen_through(func: Any) -> FunctionType:
    """A function of torch written in Python, without its first lines that hand the whole call to an observer."""
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    opened = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
