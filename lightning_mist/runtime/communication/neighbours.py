"""What a rank computes on in one microbatch, and with which ranks of the stages around it shares those rows."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_mist.plan import LiveTensor, row_slice
from lightning_mist.plan.mesh import Mesh, Overlap, overlaps, side_of
from lightning_mist.runtime.communication.boundary import Crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What a rank computes on in one microbatch.

    Attributes:
        value: The rank's rows of the owner's batch, or the whole batch, untouched.
        weight: Share of these rows in the owner's batch.
        owner: Global rank that loaded the batch.
        index: Index of the microbatch.
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
    """With whom a rank shares the rows of each microbatch; worked out once per size of batch.

    Args:
        mesh: The rank's place.
    """

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
        """How a tensor crosses the boundary between ``stage``, one of this rank's, and the stage before or after.

        Args:
            stage: The stage.
            other: Index of the other stage.
            microbatch: The microbatch.
            live: The tensor.
            length: Size of the whole tensor along its sequence dimension, if it has one.
        """
        return Crossing(
            batch_dim=live.batch_dim,
            rows=self.rows(microbatch),
            mine=side_of(self._mesh.plan, stage, live),
            theirs=side_of(self._mesh.plan, other, live),
            index=self._mesh.tensor_index,
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
