"""The tensors that cross each cut, with shapes as expressions."""

from collections.abc import Sequence

import sympy
import torch

from lightning_mist.model.spec import BILINEAR, CONSTANT, MICROBATCH, SEQUENCE, Basis, TensorSpec
from lightning_mist.plan import LiveTensor, ModuleMap

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors that enter one block."""


def _symbolic_shapes(basis: Basis, shapes: Sequence[Shapes], name: str) -> list[tuple[sympy.Expr, ...]]:
    """The shapes of what enters one block, through the shapes seen at every size."""
    what = f"a dimension of what enters {name}"
    tensors = zip(*shapes, strict=True)
    return [tuple(basis.fit(sizes, what) for sizes in zip(*tensor, strict=True)) for tensor in tensors]


def _guess(tensor: LiveTensor, rows: int, length: int | None, basis: Basis) -> tuple[sympy.Expr, ...]:
    """Dimensions of a tensor that no block takes as an argument: the batch's own, and those as long as the sequence."""
    shape: list[sympy.Expr] = []
    for dim, size in enumerate(tensor.shape):
        if dim == tensor.batch_dim and basis.powers != CONSTANT:
            # Rows and positions may be flattened into one dimension (routers of experts do so).
            per_row = sympy.Rational(size, rows)
            flat = basis.powers == BILINEAR and length is not None and size % (rows * length) == 0
            shape.append(per_row / length * MICROBATCH * SEQUENCE if flat else per_row * MICROBATCH)
        elif size == length and basis.powers == BILINEAR:
            shape.append(SEQUENCE)
        else:
            shape.append(sympy.Integer(size))
    return tuple(shape)


def boundary_specs(
    module_map: ModuleMap, basis: Basis, entering: Sequence[Sequence[Shapes]], length: int | None
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Specifications of every cut's live tensors.

    Args:
        entering: For every size, for every block, the shapes of the tensors that enter it.

    Raises:
        MisfitError: If a dimension is no polynomial of the sizes.
    """
    traced_at = {MICROBATCH: module_map.batch_rows, SEQUENCE: length or 1}
    cuts = []
    for index, cut in enumerate(module_map.cuts):
        block = index + 1
        candidates = _symbolic_shapes(basis, [run[block] for run in entering], module_map.blocks[block])
        at_trace = {tuple(int(size.subs(traced_at)) for size in shape): shape for shape in reversed(candidates)}
        tensors = []
        for tensor in cut:
            shape = at_trace.get(tensor.shape) or _guess(tensor, module_map.batch_rows, length, basis)
            dtype = getattr(torch, tensor.dtype)
            tensors.append(
                TensorSpec(
                    shape=shape,
                    dtype=tensor.dtype,
                    itemsize=torch.empty(0, dtype=dtype).element_size(),
                    requires_grad=tensor.requires_grad,
                    batch_dim=tensor.batch_dim,
                )
            )
        cuts.append(tuple(tensors))
    return tuple(cuts)
