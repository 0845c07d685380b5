"""From a plan to what one rank needs to know: its peers, its groups, and who holds and updates which parameters.

What neighbouring stages send each other follows from the same: which rows, which parts of sequences, and between which
ranks.

The ranks of a stage have three coordinates, a data-, a context- and a tensor-parallel index. *Peers* hold the same
(parts of) parameters: of one tensor-parallel index, they compute on different rows, or on different tokens of the same
rows. Tensor-parallel peers compute on the same tokens with different parts of parameters. All context- and
tensor-parallel ranks of one data-parallel index are *row peers*.

ZeRO deals parameters out within a *shard group*: all peers, or under hybrid sharding
(``StageMesh.shard_degree``) so many neighbours. All groups deal alike, so that ranks with the same place in their
groups own the same: they are each other's *replicate peers*.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from lightning_mist.errors import PlanError
from lightning_mist.plan.module_map import LiveTensor, ModuleMap, ParameterUse
from lightning_mist.plan.plan import Plan
from lightning_mist.plan.rows import RowSlice, loader_ranks, of_whole_batches, replica_of, replica_ranks, row_slice
from lightning_mist.plan.sharding import assign_owners
from lightning_mist.plan.stage_settings import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """Where one parameter lives.

    Attributes:
        stages: Sorted stages that hold a copy; of chunks that share their devices the first names them all.
        owners: For each of these stages, the place in a shard group that updates it from ZeRO-1 on; 0 where the stage
            does not shard. In the first group that is the data-parallel index which speaks for the stage when copies
            are summed over stages or gathered.
        is_even: Whether every rank of a shard group updates a piece of it (:mod:`lightning_mist.schedule.flats`); then
            ``owners`` says nothing.
    """

    name: str
    stages: tuple[int, ...]
    owners: tuple[int, ...]
    requires_grad: bool
    is_even: bool = False

    def owner(self, stage: int) -> int:
        """The place in a shard group that updates the copies of ``stage``."""
        return self.owners[self.stages.index(stage)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """What one rank needs to know of a plan.

    Attributes:
        stage: Index of its stage, of its first one where it runs several chunks.
        peers: Global ranks of the stage with its tensor-parallel index, by data-, then context-parallel index.
        peer_index: Its place among them.
        tensor_peers: Global ranks that differ from it in their tensor-parallel index only, by this.
        row_peers: Global ranks of the stage with its data-parallel index, by context-, then tensor-parallel index.
    """

    plan: Plan
    rank: int
    stage: int
    replica: int
    peer_index: int
    tensor_index: int
    peers: tuple[int, ...]
    tensor_peers: tuple[int, ...]
    row_peers: tuple[int, ...]
    parameters: tuple[HeldParameter, ...]

    @property
    def is_last(self) -> bool:
        """Whether losses are computed here."""
        return self.stage == self.plan.group_of(self.plan.num_stages - 1)

    @property
    def row_index(self) -> int:
        """This rank's place among those that compute on the same rows."""
        return self.row_peers.index(self.rank)

    @property
    def is_sharded(self) -> bool:
        """Whether the stage's peers update different parameters (from ZeRO-1 on)."""
        return self.plan.stages[self.stage].zero_stage >= ZeroStage.OPTIMIZER and len(self.peers) > 1

    @property
    def shard_peers(self) -> tuple[int, ...]:
        """Global ranks of this rank's shard group, by place; all peers where the stage does not shard."""
        first = self.peer_index - self.shard_index
        return self.peers[first : first + self._shard_ranks]

    @property
    def shard_index(self) -> int:
        """This rank's place in its shard group."""
        return self.peer_index % self._shard_ranks

    @property
    def replicate_peers(self) -> tuple[int, ...]:
        """Global ranks that own what this rank owns, one of each shard group."""
        return self.peers[self.shard_index :: self._shard_ranks]

    @property
    def _shard_ranks(self) -> int:
        return self.plan.stages[self.stage].mesh.shard_degree or len(self.peers)

    @property
    def held(self) -> tuple[HeldParameter, ...]:
        """The parameters of this rank's stages."""
        return tuple(parameter for parameter in self.parameters if self.stage in parameter.stages)

    @property
    def owned(self) -> tuple[HeldParameter, ...]:
        """The parameters that this rank's optimizer updates."""
        if not self.is_sharded:
            return self.held
        return tuple(item for item in self.held if item.is_even or item.owner(self.stage) == self.shard_index)


def stage_ranks(plan: Plan, stage: int, tensor_index: int = 0) -> tuple[int, ...]:
    """Global ranks of a stage with one tensor-parallel index, by data-, then context-parallel index."""
    mesh = plan.stages[stage].mesh
    return mesh.devices[tensor_index :: mesh.tensor_parallel_degree]


def tensor_ranks(plan: Plan, stage: int, peer_index: int) -> tuple[int, ...]:
    """Global ranks of a stage with one place among their peers, by tensor-parallel index."""
    mesh = plan.stages[stage].mesh
    width = mesh.tensor_parallel_degree
    return mesh.devices[peer_index * width : (peer_index + 1) * width]


def row_ranks(plan: Plan, stage: int, data_index: int) -> tuple[int, ...]:
    """Global ranks of a stage that compute on the same rows, by context-, then tensor-parallel index."""
    mesh = plan.stages[stage].mesh
    width = len(mesh.devices) // mesh.data_parallel_degree
    return mesh.devices[data_index * width : (data_index + 1) * width]


def make_mesh(plan: Plan, rank: int, module_map: ModuleMap) -> Mesh:
    """What ``rank`` needs to know of ``plan``."""
    stage = plan.stage_of(rank)
    mesh = plan.stages[stage].mesh
    place = mesh.devices.index(rank)
    peer_index, tensor_index = divmod(place, mesh.tensor_parallel_degree)
    return Mesh(
        plan=plan,
        rank=rank,
        stage=stage,
        replica=replica_of(plan, rank),
        peer_index=peer_index,
        tensor_index=tensor_index,
        peers=stage_ranks(plan, stage, tensor_index),
        tensor_peers=tensor_ranks(plan, stage, peer_index),
        row_peers=row_ranks(plan, stage, place * mesh.data_parallel_degree // len(mesh.devices)),
        parameters=held_parameters(plan, module_map),
    )


@lru_cache(maxsize=2)
def held_parameters(plan: Plan, module_map: ModuleMap) -> tuple[HeldParameter, ...]:
    """Where every parameter lives, and who updates it; the same for all tensor-parallel indices.

    From ZeRO-1 on a stage's trained parameters are shared out evenly, or as a whole dealt out by
    :func:`~lightning_mist.plan.sharding.assign_owners`, under ZeRO-3 also the others, on top of what each rank has by
    then; elsewhere parameters that are not trained stay with index 0.
    """
    # Chunks that share their devices hold a parameter once; a group of devices has the index of its first stage.
    stages = {
        name: tuple(sorted({plan.group_of(stage) for stage in found}))
        for name, found in module_map.owners(plan.bounds).items()
    }
    owner: dict[tuple[str, int], int] = {}
    even: set[str] = set()
    for index, stage in enumerate(plan.stages[: plan.num_groups]):
        held = [use for use in module_map.parameters if index in stages[use.name]]
        ranks = stage.mesh.shard_ranks if stage.zero_stage else 1
        loads = [0] * ranks
        shares_all = stage.zero_stage >= ZeroStage.PARAMETERS
        if shares_evenly(plan, module_map, index):
            shared = [use for use in held if use.requires_grad or shares_all]
            # Numbers, and what has no elements, would lack a form in pieces.
            cut = [use for use in shared if prod(use.shape) and use.shape and "float" in use.dtype]
            even.update(use.name for use in cut if len(stages[use.name]) == 1)
        for is_trained in (True, False) if shares_all else (True,):
            dealt = [use for use in held if use.requires_grad is is_trained and use.name not in even]
            owners = assign_owners([_nbytes(use) for use in dealt], ranks, loads)
            for use, place in zip(dealt, owners, strict=True):
                owner[use.name, index] = place
                loads[place] += _nbytes(use)
    return tuple(
        HeldParameter(
            name=use.name,
            stages=stages[use.name],
            owners=tuple(owner.get((use.name, index), 0) for index in stages[use.name]),
            requires_grad=use.requires_grad,
            is_even=use.name in even,
        )
        for use in module_map.parameters
    )


def shares_evenly(plan: Plan, module_map: ModuleMap, group: int) -> bool:
    """Whether ZeRO gives every rank of a group of devices an equal piece of what no other group holds."""
    stage = plan.stages[group]
    is_shared = stage.zero_stage >= ZeroStage.OPTIMIZER and stage.mesh.shard_ranks > 1
    in_order = list(stage.devices) == sorted(stage.devices)  # as collectives have them
    return is_shared and in_order and module_map.even_shards


def names_with_values(plan: Plan, module_map: ModuleMap, rank: int) -> frozenset[str]:
    """Canonical names of the parameters whose values a rank keeps between steps, if only in part."""
    mesh = make_mesh(plan, rank, module_map)
    is_dealt_out = plan.stages[mesh.stage].zero_stage >= ZeroStage.PARAMETERS and len(mesh.peers) > 1
    kept = mesh.held
    if is_dealt_out:
        kept = mesh.owned
    return frozenset(parameter.name for parameter in kept)


def tied_groups(plan: Plan, parameter: HeldParameter) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks over each of which the gradient of a parameter with several copies is summed.

    Where no stage shards and all have as many peers, equal places among peers form a group and every copy gets the sum
    at once. Otherwise one of these places of each stage speaks for it; see
    :func:`needs_spreading`. Equal tensor-parallel indices hold equal parts and form groups of their own; where the
    tensor-parallel degrees differ there are no equal parts, and all tensor-parallel ranks form one group; see
    :func:`sums_wholes`.
    """
    if sums_wholes(plan, parameter):
        columns = [
            [tensor_ranks(plan, stage, index) for index in _speaking(plan, parameter, stage)]
            for stage in parameter.stages
        ]
        return tuple(tuple(sorted(rank for ranks in column for rank in ranks)) for column in zip(*columns, strict=True))
    degree = plan.stages[parameter.stages[0]].mesh.tensor_parallel_degree
    groups = []
    for tensor_index in range(degree):
        rows = [
            [stage_ranks(plan, stage, tensor_index)[index] for index in _speaking(plan, parameter, stage)]
            for stage in parameter.stages
        ]
        groups += [tuple(sorted(group)) for group in zip(*rows, strict=True)]
    return tuple(groups)


def sums_wholes(plan: Plan, parameter: HeldParameter) -> bool:
    """Whether the copies of a parameter differ in how tensor parallelism shares them out.

    Their gradients are then put together to the whole gradient before they are summed.
    """
    return len({plan.stages[stage].mesh.tensor_parallel_degree for stage in parameter.stages}) > 1


def needs_spreading(plan: Plan, parameter: HeldParameter, stage: int) -> bool:
    """Whether a stage's speakers must hand the summed gradient of a tied parameter to others that update it.

    These are their peers, or where the stage shards their replicate peers.
    """
    if plan.stages[stage].zero_stage >= ZeroStage.OPTIMIZER:
        return plan.stages[stage].mesh.shard_degree is not None
    return plan.stages[stage].mesh.num_peers > 1 and not _is_aligned(plan, parameter)


def process_groups(plan: Plan, module_map: ModuleMap) -> tuple[tuple[int, ...], ...]:
    """Every group that a run of the plan needs, in an order that is the same on all ranks.

    The world; the ranks of each replica; the peers of each stage by tensor-parallel index, their shard groups and
    replicate peers where these are others, and the ranks that compute on the same rows; the ranks that sum tied
    gradients.
    """
    groups = _exchanging(plan)
    for index, stage in enumerate(plan.stages[: plan.num_groups]):
        for tensor in range(stage.mesh.tensor_parallel_degree):
            peers, count = stage_ranks(plan, index, tensor), stage.mesh.shard_degree
            groups.append(peers)
            if count is not None:
                groups += [peers[first : first + count] for first in range(0, len(peers), count)]
                groups += [peers[place::count] for place in range(count)]
        groups += [row_ranks(plan, index, data) for data in range(stage.data_parallel_degree)]
    for parameter in held_parameters(plan, module_map):
        if parameter.requires_grad and len(parameter.stages) > 1:
            groups += tied_groups(plan, parameter)
    return tuple(dict.fromkeys(tuple(sorted(group)) for group in groups if len(group) > 1))


def talking_groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The groups whose ranks tell each other what is not on a device: objects, and what batches look like.

    The world, replicas, and ranks that load the same samples.
    """
    groups = _exchanging(plan)
    groups += [loader_ranks(plan, loader) for loader in range(plan.num_loaders)]
    return tuple(dict.fromkeys(group for group in groups if len(group) > 1))


def _exchanging(plan: Plan) -> list[tuple[int, ...]]:
    """The world, and the ranks that exchange batches, in training and in evaluation."""
    plans = (plan, of_whole_batches(plan))
    found = [replica_ranks(each, index) for each in plans if each is not None for index in range(each.num_replicas)]
    return [tuple(range(plan.world_size)), *found]


def _speaking(plan: Plan, parameter: HeldParameter, stage: int) -> tuple[int, ...]:
    """Places among a stage's peers that take part in the sum of a tied parameter's gradients."""
    if _is_aligned(plan, parameter):
        return tuple(range(plan.stages[stage].mesh.num_peers))
    return (parameter.owner(stage),)


def _is_aligned(plan: Plan, parameter: HeldParameter) -> bool:
    stages = [plan.stages[stage] for stage in parameter.stages]
    counts = {stage.mesh.num_peers for stage in stages}
    return len(counts) == 1 and all(stage.zero_stage < ZeroStage.OPTIMIZER for stage in stages)


def _nbytes(use: ParameterUse) -> int:
    return prod(use.shape) * itemsize(use.dtype)


@lru_cache(maxsize=64)
def itemsize(dtype: str) -> int:
    """Bytes of one element of a type, by torch's name of it: the first number in the name counts its bits."""
    if dtype == "bool":
        return 1
    bits = re.search(r"\d+", dtype)
    if bits is None:
        raise PlanError(f"dtype {dtype!r}: a type of elements that says how many bits it has, such as float32")
    return int(bits[0]) // 8


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
