"""Live tensors at a boundary between stages: cutting them by rows, joining them, and the end of a stage's graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.runtime.mesh import Overlap


def span(size: int, rows: int, overlap: Overlap) -> tuple[int, int]:
    """Start and length, along a dimension of ``size`` entries for ``rows`` rows, of the rows of an overlap.

    A dimension may hold several entries per row (heads folded into the batch, for example).

    Raises:
        TraceError: If the entries cannot be told apart by row.
    """
    if (overlap.first, overlap.end) == (0, rows):
        return 0, size
    if size % rows:
        raise TraceError(
            f"a tensor that crosses a boundary has {size} entries along its batch dimension for {rows} rows: to be "
            "cut, it needs a multiple of the rows; use the same data_parallel_degree on both sides"
        )
    factor = size // rows
    return overlap.first * factor, (overlap.end - overlap.first) * factor


def part_shape(shape: Sequence[int], batch_dim: int | None, rows: int, overlap: Overlap) -> tuple[int, ...]:
    """Shape of the part of a tensor that belongs to an overlap; the whole shape without a batch dimension."""
    if batch_dim is None:
        return tuple(shape)
    sizes = list(shape)
    sizes[batch_dim] = span(sizes[batch_dim], rows, overlap)[1]
    return tuple(sizes)


def part_of(tensor: Tensor, batch_dim: int | None, rows: int, overlap: Overlap) -> Tensor:
    """The part of a tensor that belongs to an overlap: contiguous, without history, sharing memory where it can."""
    tensor = tensor.detach()
    if batch_dim is not None:
        start, length = span(tensor.shape[batch_dim], rows, overlap)
        tensor = tensor.narrow(batch_dim, start, length)
    return tensor.contiguous()


def join(parts: Sequence[Tensor], batch_dim: int | None) -> Tensor:
    """A tensor from its parts by ascending row; parts of a tensor without batch dimension are summed."""
    if len(parts) == 1:
        return parts[0]
    if batch_dim is None:
        return torch.stack(tuple(parts)).sum(0)
    return torch.cat(tuple(parts), dim=batch_dim)


class GraphEnd:
    """Where a stage's graph ends: gradients that arrive later go in here, the tensors themselves need not live.

    Keeping the tensors that were sent would keep their memory until backward. Their graph hangs on an empty scalar
    instead, whose backward hands out the gradients that :meth:`backward` is given.

    Args:
        tensors: Tensors that require a gradient; not kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # The node holds this list and not the object itself, which would be a cycle around the whole graph.
        self._gradients: list[Tensor | None] = []
        self._anchor: Tensor = _Anchor.apply(self._gradients, *tensors)  # type: ignore[no-untyped-call]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Run the graph's backward with one gradient per tensor; None where none came."""
        self._gradients[:] = gradients
        self._anchor.backward()  # type: ignore[no-untyped-call]


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return (None, *gradients)
