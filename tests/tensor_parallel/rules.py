"""Compares a function of split tensors with the same function of whole ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_mist.tensor_parallel import Layout, SplitContext, SplitTensor, functions_of_wholes, run_ranks, whole
from lightning_mist.tensor_parallel.shard_layout import join_parts, take


def tensor(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


def backward(value: Any) -> list[Tensor]:
    """Back-propagate fixed cotangents from all results; the results."""
    leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    generator = torch.Generator().manual_seed(7)
    active = [leaf for leaf in leaves if leaf.requires_grad]
    torch.autograd.backward(active, [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in active])
    return [leaf.detach() for leaf in leaves]


def check(
    function: Callable[..., Any],
    *operands: tuple[Tensor, int | tuple[int, int] | None],
    gathers: tuple[str, ...] = (),
    results: tuple[int | None, ...] | None = None,
    degrees: tuple[int, ...] = (2, 4),
    sequence_parallel: bool = False,
    tolerance: float = 1e-12,
) -> None:
    """Check a function's results and gradients on ranks.

    Args:
        function: Of tensors.
        operands: Each with the dimension that is shared out (or that and how often it repeats), None for a whole one.
        gathers: What may have needed whole tensors.
        results: The shared dimension of every tensor that comes out, None for whole ones.
        degrees: Numbers of ranks.
        sequence_parallel: Of the context.
        tolerance: Of values and gradients.
    """
    layouts = [_layout(value, share) for value, share in operands]
    wholes = [_leaf(value.clone()) for value, _ in operands]
    expected = backward(function(*wholes))
    for degree in degrees:

        def rank(group: Any, degree: int = degree) -> Any:
            context = SplitContext(group, sequence_parallel)
            parts = [
                _leaf(value.clone() if layout is None else take(value, layout, group.rank, degree).clone())
                for (value, _), layout in zip(operands, layouts, strict=True)
            ]
            shown = [
                part if layout is None else SplitTensor(part, layout, context)
                for part, layout in zip(parts, layouts, strict=True)
            ]
            with functions_of_wholes():
                result = function(*shown)
                leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
                dims = tuple(leaf.shared_dim if isinstance(leaf, SplitTensor) else None for leaf in leaves)
                for leaf in leaves:
                    if isinstance(leaf, SplitTensor):
                        assert tuple(leaf.local.shape) == leaf.placement.local_sizes(degree)
                found = backward(whole(result))
            return found, [part.grad for part in parts], context.gathered, dims

        ranks = run_ranks(degree, rank)
        for found, _, gathered, dims in ranks:
            assert set(gathered) == set(gathers), gathered
            assert results is None or dims == results
            assert len(found) == len(expected)
            for value, wanted in zip(found, expected, strict=True):
                assert value.dtype == wanted.dtype
                torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)
        for index, (layout, wanted) in enumerate(zip(layouts, wholes, strict=True)):
            grads = [gradients[index] for _, gradients, _, _ in ranks]
            if wanted.grad is None:
                assert all(grad is None or not grad.any() for grad in grads)
                continue
            assert all(grad is not None for grad in grads), f"operand {index} got no gradient"
            if layout is not None:
                grads = [join_parts(torch.stack(grads), layout, degree)]
            for grad in grads:
                torch.testing.assert_close(grad, wanted.grad, rtol=tolerance, atol=tolerance)


def _layout(value: Tensor, share: int | tuple[int, int] | None) -> Layout | None:
    if share is None:
        return None
    dim, outer = share if isinstance(share, tuple) else (share, 1)
    return Layout(tuple(value.shape), dim % value.dim(), outer)


def _leaf(value: Tensor) -> Tensor:
    return value.requires_grad_() if value.is_floating_point() else value
