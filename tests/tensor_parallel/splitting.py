"""Runs a module on parts of its parameters and compares with the whole module."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import (
    SplitContext,
    functions_of_wholes,
    local_of,
    present,
    run_ranks,
    shard,
    unshard,
    whole,
)
from tests.integration.parity import precision_of

Call = Callable[[nn.Module, SplitContext | None], Any]


def column(name: str, *sizes: int, dim: int = 0) -> ParameterSplit:
    """A parameter of which the second of two factors (or the only one) of a dimension is shared out."""
    factors = tuple((size, index == len(sizes) - 1) for index, size in enumerate(sizes))
    return ParameterSplit(name=name, dim=dim, factors=factors)


def install(module: nn.Module, splits: list[ParameterSplit], context: SplitContext) -> dict[str, Tensor]:
    """Put parts of parameters into their slots, everywhere they are used; the parameters by name."""
    by_name = {split.name: split for split in splits}
    named = dict(module.named_parameters())
    parts: dict[int, Tensor] = {}
    locals_ = {}
    for name, parameter in named.items():
        local = parameter
        if name in by_name:
            local = nn.Parameter(shard(parameter.detach(), by_name[name], context.rank, context.degree))
            local.requires_grad_(parameter.requires_grad)
            parts[id(parameter)] = present(local, by_name[name], context)
        locals_[name] = local
    for child in module.modules():
        for slot, parameter in list(child._parameters.items()):
            if parameter is not None and id(parameter) in parts:
                child._parameters[slot] = parts[id(parameter)]
    return locals_


def run(module: nn.Module, call: Call, context: SplitContext | None) -> Any:
    value = call(module, context)
    value = value if context is None else whole(value)
    tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.manual_seed(5)
    loss = sum((tensor * torch.randn(tensor.shape, dtype=tensor.dtype)).sum() for tensor in tensors)
    loss.backward()
    return [tensor.detach() for tensor in tensors]


def compare(
    module: nn.Module,
    call: Call,
    splits: list[ParameterSplit],
    degree: int = 2,
    *,
    sequence_parallel: bool = False,
    tolerance: float = 1e-11,
    gathers: tuple[str, ...] = (),
    inputs: tuple[Tensor, ...] = (),
) -> list[SplitContext]:
    """Check outputs and gradients of parameters and inputs on ranks against the whole module.

    ``gathers`` names all functions that may have gathered.
    """
    reference = copy.deepcopy(module)
    with precision_of(module):
        expected = run(reference, call, None)
    expected_inputs = [value.grad for value in inputs]
    for value in inputs:
        value.grad = None

    def rank(group: Any) -> Any:
        context = SplitContext(group, sequence_parallel)
        mine = copy.deepcopy(module)
        locals_ = install(mine, splits, context)
        own_inputs = [value.detach().clone().requires_grad_() for value in inputs]
        with ExitStack() as stack:
            stack.enter_context(functions_of_wholes())
            outputs = run(_Bound(mine, own_inputs) if inputs else mine, call, context)
        gradients = {name: local_of(value).grad for name, value in locals_.items()}
        return outputs, gradients, [value.grad for value in own_inputs], context

    with precision_of(module):  # once for all ranks: patches of several threads do not nest
        ranks = run_ranks(degree, rank)
    for outputs, _, input_gradients, context in ranks:
        for output, value in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, value, rtol=tolerance, atol=tolerance)
        for gradient, value in zip(input_gradients, expected_inputs, strict=True):
            torch.testing.assert_close(gradient, value, rtol=tolerance, atol=tolerance)
        assert set(context.gathered) == set(gathers), context.gathered
    by_name = {split.name: split for split in splits}
    for name, parameter in reference.named_parameters():
        parts = [gradients[name] for _, gradients, _, _ in ranks]
        if parameter.grad is None:
            assert all(part is None for part in parts), name
            continue
        assert all(part is not None for part in parts), f"{name} got no gradient"
        found = [unshard(parts, by_name[name])] if name in by_name else parts
        for gradient in found:
            torch.testing.assert_close(
                gradient, parameter.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    return [context for *_, context in ranks]


class _Bound:
    """A module together with inputs of its own."""

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        self.module, self.inputs = module, inputs
