"""What one operator costs: floating-point operations and bytes moved, from its arguments and its result.

Works on real and on fake tensors alike, since only shapes are looked at.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_mist.optimizers import tensors_within


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Two products per score: ``q k^T`` and ``p v``; a causal mask is not counted as saving, as torch does."""
    batch, heads, length, width = map(int, query.shape)
    return 2 * batch * heads * length * int(key.shape[2]) * (width + int(value.shape[3]))


def _attention_backward_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Five products: scores again, and the gradients of value, probabilities, query and key."""
    batch, heads, length, width = map(int, query.shape)
    return 2 * batch * heads * length * int(key.shape[2]) * (3 * width + 2 * int(value.shape[3]))


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
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


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


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage for as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def computes(operator: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an operator reads or writes elements, rather than only making another view of them."""
    if operator.is_view:
        return False
    if operator._schema.is_mutable or not outputs or not inputs:
        return True
    keys = {storage_key(tensor) for tensor in inputs}
    return any(storage_key(tensor) not in keys for tensor in outputs)


def flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
    """Floating-point operations by torch's own formulas; a multiply-add is two, element-wise operators are none."""
    packet = operator._overloadpacket
    if packet.__name__ in _ATTENTION:
        return _attention_flops(args[0], args[1], args[2])
    if packet.__name__.removesuffix("_backward") in _ATTENTION:
        return _attention_backward_flops(args[1], args[2], args[3])
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
