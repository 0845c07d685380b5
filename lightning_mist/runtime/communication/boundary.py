"""Microbatches and live tensors at a boundary between stages: who sends what to whom, and the end of a stage's graph.

Two stages exchange rows by the overlap of their ranks' slices, and along the sequence by the overlap of the parts that
their tensor-parallel ranks hold. Gradients go the same way back, by the same rule with the sides exchanged: a rank
that holds a part, or the whole, gets the gradient of just that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.plan import LiveTensor, row_slice
from lightning_mist.plan.mesh import Mesh
from lightning_mist.plan.messages import Overlap, Side, overlaps, side_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """What of a tensor is exchanged with one rank.

    Attributes:
        start: Where it begins along the sequence, counted from the start of this rank's part.
    """

    rank: int
    overlap: Overlap
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How one tensor of one microbatch crosses a boundary, seen from one rank.

    Attributes:
        rows: Rows of this rank's part of the microbatch.
        sequence_dim: The dimension that either side may hold in parts, or None.
        length: Size of the whole tensor along it; 1 if there is none.
    """

    batch_dim: int | None
    rows: int
    mine: Side
    theirs: Side
    index: int
    sequence_dim: int | None = None
    length: int = 1

    def arriving(self, overlaps: Sequence[Overlap]) -> tuple[tuple[Portion, ...], ...]:
        """What comes from the other side, for each overlap in the order of the sequence."""
        begin, _ = self.mine.held(self.index, self.length)
        sources = self.mine.sources(self.index, self.theirs, self.length)
        return tuple(
            tuple(
                Portion(rank=overlap.ranks[other], overlap=overlap, start=start - begin, size=end - start)
                for other, start, end in sources
            )
            for overlap in overlaps
        )

    def leaving(self, overlaps: Sequence[Overlap]) -> tuple[Portion, ...]:
        """What goes to the other side."""
        begin, _ = self.mine.held(self.index, self.length)
        return tuple(
            Portion(rank=overlap.ranks[other], overlap=overlap, start=start - begin, size=end - start)
            for overlap in overlaps
            for other in range(self.theirs.degree)
            for source, start, end in self.theirs.sources(other, self.mine, self.length)
            if source == self.index
        )

    def shape(self, shape: Sequence[int], portion: Portion) -> tuple[int, ...]:
        """Shape of a portion of a tensor that this rank holds in this shape."""
        sizes = list(shape)
        if self.batch_dim is not None:
            sizes[self.batch_dim] = span(sizes[self.batch_dim], self.rows, portion.overlap)[1]
        if self.sequence_dim is not None:
            sizes[self.sequence_dim] = portion.size
        return tuple(sizes)

    def cut(self, tensor: Tensor, portion: Portion) -> Tensor:
        """A portion of what this rank holds: contiguous, without history, sharing memory where it can."""
        tensor = tensor.detach()
        if self.batch_dim is not None:
            start, size = span(tensor.shape[self.batch_dim], self.rows, portion.overlap)
            tensor = tensor.narrow(self.batch_dim, start, size)
        if self.sequence_dim is not None:
            tensor = tensor.narrow(self.sequence_dim, portion.start, portion.size)
        return tensor.contiguous()

    def join(self, portions: Sequence[Sequence[Tensor]]) -> Tensor:
        """What this rank holds from all that :meth:`arriving` announced.

        Portions of a tensor without batch dimension from several overlaps are summed.
        """
        parts = [_cat(row, self.sequence_dim) for row in portions]
        if self.batch_dim is None and len(parts) > 1:
            return torch.stack(parts).sum(0)
        return _cat(parts, self.batch_dim)


def _cat(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    assert dim is not None
    return torch.cat(tuple(parts), dim=dim)


class GraphEnd:
    """Where a stage's graph ends: gradients that arrive later go in here, the tensors themselves need not live.

    Keeping the tensors that were sent would keep their memory until backward. Their graph hangs on an empty scalar
    instead, whose backward hands out the gradients that :meth:`backward` is given.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # The node holds this list and not the object itself, which would be a cycle around the whole graph.
        self._gradients: list[Tensor | None] = []
        self._anchor: Tensor = _Anchor.apply(self._gradients, *tensors)  # type: ignore[no-untyped-call]

    def backward(self, gradients: list[Tensor | None], marker: Tensor | None = None) -> None:
        """Run the graph's backward with one gradient per tensor; None where none came.

        Args:
            gradients: The gradients. The list is emptied, so that backward can free each of them when it has used it.
            marker: Another end of the same graph, whose gradient does not matter.
        """
        self._gradients[:] = gradients
        gradients.clear()
        torch.autograd.backward([self._anchor] if marker is None else [self._anchor, marker])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What a rank computes on in one microbatch.

    Attributes:
        value: The rank's rows of the owner's batch, or the whole batch, untouched.
        weight: Share of these rows in the owner's batch.
        owner: Global rank that loaded the batch.
        batch_rows: Rows of the owner's whole batch; None if they cannot be counted (then nothing is cut).
        random_state: State of the owner's generators, for whole batches; it travels from stage to stage.
        seed: Otherwise the seed of this part; None leaves the generators alone.
    """

    value: Any
    weight: float
    owner: int
    index: int
    batch_rows: int | None = None
    random_state: Tensor | None = None
    seed: int | None = None


class Neighbours:
    """With whom a rank shares the rows of each microbatch; worked out once per size of batch."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._overlaps: dict[tuple[int, int, int, int | None], tuple[Overlap, ...]] = {}
        self._slices = tuple(row_slice(mesh.plan, mesh.rank, index) for index in range(mesh.plan.num_microbatches))

    def rows(self, microbatch: Microbatch) -> int:
        """Rows of this rank's part; 1 for a whole batch that has none to count."""
        if microbatch.batch_rows is None:
            return 1
        first, end = self._slices[microbatch.index].rows(microbatch.batch_rows)
        return end - first

    def before(self, stage: int, microbatch: Microbatch, batch_dim: int | None = 0) -> tuple[Overlap, ...]:
        """Ranks of the stage before ``stage``, one of this rank's, with which it exchanges a tensor, by ascending row.

        A tensor without batch dimension comes whole from the first of them.
        """
        sources = self._of(self._mesh.rank, stage - 1, microbatch)
        return sources if batch_dim is not None else sources[:1]

    def after(self, stage: int, microbatch: Microbatch, batch_dim: int | None = 0) -> tuple[Overlap, ...]:
        """Ranks of the stage after ``stage``, one of this rank's, with which it exchanges a tensor, by ascending row.

        A tensor without batch dimension goes whole from the first of each receiver's sources.
        """
        targets = self._of(self._mesh.rank, stage + 1, microbatch)
        if batch_dim is not None:
            return targets
        rank = self._mesh.rank
        return tuple(target for target in targets if rank in self._of(target.ranks[0], stage, microbatch)[0].ranks)

    def crossing(self, stage: int, other: int, microbatch: Microbatch, live: LiveTensor, length: int = 1) -> Crossing:
        """How a tensor crosses the boundary between ``stage``, one of this rank's, and the stage before or after."""
        return Crossing(
            batch_dim=live.batch_dim,
            rows=self.rows(microbatch),
            mine=side_of(self._mesh.plan, stage, live),
            theirs=side_of(self._mesh.plan, other, live),
            index=self._mesh.row_index,
            sequence_dim=live.sequence_dim,
            length=length,
        )

    def _of(self, rank: int, neighbour: int, microbatch: Microbatch) -> tuple[Overlap, ...]:
        key = (rank, neighbour, microbatch.index, microbatch.batch_rows)
        found = self._overlaps.get(key)
        if found is None:
            found = self._overlaps[key] = overlaps(
                self._mesh.plan, rank, neighbour, microbatch.index, microbatch.batch_rows
            )
        return found
