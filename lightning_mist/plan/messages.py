"""What neighbouring stages send each other: which rows, which parts of sequences, and between which ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

from lightning_mist.errors import PlanError
from lightning_mist.plan.mesh import row_ranks
from lightning_mist.plan.module_map import LiveTensor
from lightning_mist.plan.plan import Plan
from lightning_mist.plan.rows import RowSlice, replica_of, row_slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Rows, counted from the start of this rank's slice, that it shares with others of a neighbouring stage."""

    ranks: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How ranks that compute on the same rows hold a tensor on one side of a boundary.

    Attributes:
        degree: How many they are.
        is_shared: Whether each holds a part along the sequence; otherwise, and where the length of the sequence is not
            a multiple of the degree, each holds the whole.
    """

    degree: int
    is_shared: bool = False

    def is_parted(self, length: int) -> bool:
        """Whether a tensor with a sequence of this length is held in parts."""
        return self.is_shared and length % self.degree == 0

    def held(self, index: int, length: int) -> tuple[int, int]:
        """Half-open range of the sequence that the rank with this place among them holds."""
        if not self.is_parted(length):
            return 0, length
        return index * length // self.degree, (index + 1) * length // self.degree

    def sources(self, index: int, others: "Side", length: int) -> tuple[tuple[int, int, int], ...]:
        """From which ranks of the other side the rank ``index`` of this side gets what: index, start and end.

        The ranks of a side that holds whole tensors have equal ones, so each serves some of those that ask.
        """
        start, end = self.held(index, length)
        if not others.is_parted(length):
            return ((index % others.degree, start, end),)
        found = []
        for other in range(others.degree):
            low, high = others.held(other, length)
            low, high = max(low, start), min(high, end)
            if low < high:
                found.append((other, low, high))
        return tuple(found)


def overlaps(plan: Plan, rank: int, neighbour: int, microbatch: int, batch_rows: int | None) -> tuple[Overlap, ...]:
    """With whom of a neighbouring stage ``rank`` exchanges which rows of a microbatch.

    Args:
        neighbour: Index of the stage before or after the rank's own.
        batch_rows: Rows of the owner's batch; None for a batch that cannot be cut.

    Returns:
        The shared rows by ascending row. Rows are counted from the start of this rank's slice; ``(0, 1)`` stands for a
        whole batch that cannot be cut. Empty if the rank's slice has no rows.
    """
    mine = row_slice(plan, rank, microbatch)
    first, end = _rows(mine, microbatch, batch_rows)
    replica = replica_of(plan, rank)
    found = []
    for index in range(plan.stages[neighbour].data_parallel_degree):
        ranks = row_ranks(plan, neighbour, index)
        if replica_of(plan, ranks[0]) != replica:
            continue
        theirs = row_slice(plan, ranks[0], microbatch)
        low, high = _rows(theirs, microbatch, batch_rows)
        low, high = max(first, low), min(end, high)
        if theirs.owner == mine.owner and low < high:
            found.append(Overlap(ranks=ranks, first=low - first, end=high - first))
    return tuple(sorted(found, key=lambda overlap: overlap.first))


def side_of(plan: Plan, stage: int, live: LiveTensor) -> Side:
    """How the ranks of a stage that compute on the same rows hold a tensor that crosses one of its boundaries."""
    mesh = plan.stages[stage].mesh
    return Side(degree=mesh.num_row_peers, is_shared=mesh.shares_sequence and live.sequence_dim is not None)


MESSAGE_CHANNELS = 4
"""Most channels of a message's kernel, which spins on one multiprocessor each until the other end is there: a receive
is posted a computation early. Not measured on a device yet."""


@lru_cache(maxsize=8)
def message_pairs(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Every pair of ranks of which the first sends to the second; sorted, the same whoever asks.

    Activations go to the next stage, gradients back.
    """
    # Chunks of the same groups of devices send each other the same messages.
    meshes = [stage.mesh for stage in plan.stages]
    crossed = {pair: stage for stage, pair in enumerate(pairwise(meshes))}
    pairs = {pair for stage in crossed.values() for pair in _crossing(plan, stage, stage + 1)}
    return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))


def _rows(piece: RowSlice, microbatch: int, batch_rows: int | None) -> tuple[int, int]:
    if batch_rows is not None:
        return piece.rows(batch_rows)
    if piece.parts > 1:
        raise PlanError(
            f"microbatch {microbatch} is part {piece.part} of {piece.parts} of the batch of rank {piece.owner}, which "
            "has no rows to count: only batches whose tensors share their first dimension can be cut; use a plan with "
            "one part per batch"
        )
    return 0, 1


def _crossing(plan: Plan, stage: int, following: int) -> Iterator[tuple[int, int]]:
    """Who sends to whom between two stages: ranks that compute on the same rows and hold the same part."""
    first, second = plan.stages[stage], plan.stages[following]
    mine, theirs = first.data_parallel_degree, second.data_parallel_degree
    # Tensors that have no sequence, and states of generators, are held whole also where others are in parts.
    # So are sequences on a side that their length cannot be divided by.
    forward, back = set[tuple[int, int]](), set[tuple[int, int]]()
    for are_shared in product({first.mesh.shares_sequence, False}, {second.mesh.shares_sequence, False}):
        degrees = first.mesh.num_row_peers, second.mesh.num_row_peers
        sides = [Side(degree=n, is_shared=shared) for n, shared in zip(degrees, are_shared, strict=True)]
        forward.update(_portions(*sides))
        back.update(_portions(*reversed(sides)))
    # Data-parallel index j of d has the rows from j / d to (j + 1) / d of every microbatch.
    for here in range(mine):
        before = row_ranks(plan, stage, here)
        for there in range(here * theirs // mine, -(-(here + 1) * theirs // mine)):
            after = row_ranks(plan, following, there)
            yield from ((before[source], after[index]) for source, index in forward)
            yield from ((after[source], before[index]) for source, index in back)


def _portions(mine: Side, theirs: Side) -> Iterator[tuple[int, int]]:
    """Places among the ranks of one side that send to which of the other."""
    length = mine.degree * theirs.degree  # divisible, as sequences that are shared out are
    for index in range(theirs.degree):
        for source, _, _ in theirs.sources(index, mine, length):
            yield source, index
