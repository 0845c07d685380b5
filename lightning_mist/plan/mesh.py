"""From a plan to what one rank needs to know: its peers, its groups, and which rows it exchanges with whom.

The ranks of a stage have two coordinates, a data-parallel and a tensor-parallel index. Data-parallel peers hold the
same (parts of) parameters and compute on different rows; tensor-parallel peers compute on the same rows with different
parts of parameters.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from lightning_mist.errors import PlanError
from lightning_mist.plan.module_map import LiveTensor, ModuleMap, ParameterUse
from lightning_mist.plan.plan import Plan
from lightning_mist.plan.rows import RowSlice, replica_of, replica_ranks, row_slice
from lightning_mist.plan.sharding import assign_owners
from lightning_mist.plan.stage_settings import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """Where one parameter lives.

    Attributes:
        stages: Sorted stages that hold a copy; of chunks that share their devices the first names them all.
        owners: For each of these stages, the data-parallel index that updates it from ZeRO-1 on (and that speaks for
            the stage when copies are summed over stages or gathered); 0 where the stage does not shard.
    """

    name: str
    stages: tuple[int, ...]
    owners: tuple[int, ...]
    requires_grad: bool

    def owner(self, stage: int) -> int:
        """The data-parallel index that updates the copy of ``stage``."""
        return self.owners[self.stages.index(stage)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """What one rank needs to know of a plan.

    Attributes:
        stage: Index of its stage, of its first one where it runs several chunks.
        peers: Global ranks of the stage with its tensor-parallel index, by data-parallel index.
        tensor_peers: Global ranks of the stage with its data-parallel index, by tensor-parallel index.
    """

    plan: Plan
    rank: int
    stage: int
    replica: int
    data_index: int
    tensor_index: int
    peers: tuple[int, ...]
    tensor_peers: tuple[int, ...]
    parameters: tuple[HeldParameter, ...]

    @property
    def is_last(self) -> bool:
        """Whether losses are computed here."""
        return self.stage == self.plan.group_of(self.plan.num_stages - 1)

    @property
    def is_sharded(self) -> bool:
        """Whether the stage's data-parallel ranks update different parameters (from ZeRO-1 on)."""
        return self.plan.stages[self.stage].zero_stage >= ZeroStage.OPTIMIZER and len(self.peers) > 1

    @property
    def held(self) -> tuple[HeldParameter, ...]:
        """The parameters of this rank's stages."""
        return tuple(parameter for parameter in self.parameters if self.stage in parameter.stages)

    @property
    def owned(self) -> tuple[HeldParameter, ...]:
        """The parameters that this rank's optimizer updates."""
        if not self.is_sharded:
            return self.held
        return tuple(parameter for parameter in self.held if parameter.owner(self.stage) == self.data_index)

    def speaker(self, parameter: HeldParameter) -> int:
        """The global rank that answers for a parameter: the owner in the first stage that holds it.

        Where tensor parallelism has shared the parameter out, it is the first of those that do.
        """
        return stage_ranks(self.plan, parameter.stages[0])[parameter.owners[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Rows that this rank shares with one data-parallel index of a neighbouring stage in one microbatch.

    Attributes:
        first: First of the rows, counted from the start of this rank's slice.
    """

    ranks: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How the tensor-parallel ranks on one side of a boundary hold a tensor.

    Attributes:
        is_shared: Whether each holds a part along the sequence; otherwise, and where the length of the sequence is not
            a multiple of the degree, each holds the whole.
    """

    degree: int
    is_shared: bool = False

    def is_parted(self, length: int) -> bool:
        """Whether a tensor with a sequence of this length is held in parts."""
        return self.is_shared and length % self.degree == 0

    def held(self, index: int, length: int) -> tuple[int, int]:
        """Half-open range of the sequence that the rank with this tensor-parallel index holds."""
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


def stage_ranks(plan: Plan, stage: int, tensor_index: int = 0) -> tuple[int, ...]:
    """Global ranks of a stage with one tensor-parallel index, by data-parallel index."""
    mesh = plan.stages[stage].mesh
    return mesh.devices[tensor_index :: len(mesh.devices) // mesh.data_parallel_degree]


def tensor_ranks(plan: Plan, stage: int, data_index: int) -> tuple[int, ...]:
    """Global ranks of a stage with one data-parallel index, by tensor-parallel index."""
    mesh = plan.stages[stage].mesh
    width = len(mesh.devices) // mesh.data_parallel_degree
    return mesh.devices[data_index * width : (data_index + 1) * width]


def make_mesh(plan: Plan, rank: int, module_map: ModuleMap) -> Mesh:
    """What ``rank`` needs to know of ``plan``."""
    stage = plan.stage_of(rank)
    mesh = plan.stages[stage].mesh
    data_index, tensor_index = divmod(mesh.devices.index(rank), len(mesh.devices) // mesh.data_parallel_degree)
    return Mesh(
        plan=plan,
        rank=rank,
        stage=stage,
        replica=replica_of(plan, rank),
        data_index=data_index,
        tensor_index=tensor_index,
        peers=stage_ranks(plan, stage, tensor_index),
        tensor_peers=tensor_ranks(plan, stage, data_index),
        parameters=held_parameters(plan, module_map),
    )


def held_parameters(plan: Plan, module_map: ModuleMap) -> tuple[HeldParameter, ...]:
    """Where every parameter lives, and who updates it; the same for all tensor-parallel indices.

    From ZeRO-1 on a stage's trained parameters are dealt out by
    :func:`~lightning_mist.plan.sharding.assign_owners`, under ZeRO-3 then also the others, on top of what each rank
    has by then; elsewhere parameters that are not trained stay with index 0.
    """
    # Chunks that share their devices hold a parameter once; a group of devices has the index of its first stage.
    stages = {
        name: tuple(sorted({plan.group_of(stage) for stage in found}))
        for name, found in module_map.owners(plan.bounds).items()
    }
    owner: dict[tuple[str, int], int] = {}
    for index, stage in enumerate(plan.stages[: plan.num_groups]):
        held = [use for use in module_map.parameters if index in stages[use.name]]
        ranks = stage.data_parallel_degree if stage.zero_stage >= ZeroStage.OPTIMIZER else 1
        loads = [0] * ranks
        for is_trained in (True, False) if stage.zero_stage >= ZeroStage.PARAMETERS else (True,):
            dealt = [use for use in held if use.requires_grad is is_trained]
            owners = assign_owners([_nbytes(use) for use in dealt], ranks, loads)
            for use, data_index in zip(dealt, owners, strict=True):
                owner[use.name, index] = data_index
                loads[data_index] += _nbytes(use)
    return tuple(
        HeldParameter(
            name=use.name,
            stages=stages[use.name],
            owners=tuple(owner.get((use.name, index), 0) for index in stages[use.name]),
            requires_grad=use.requires_grad,
        )
        for use in module_map.parameters
    )


def names_with_values(plan: Plan, module_map: ModuleMap, rank: int) -> frozenset[str]:
    """Canonical names of the parameters whose values a rank keeps between steps, if only in part."""
    mesh = make_mesh(plan, rank, module_map)
    is_dealt_out = plan.stages[mesh.stage].zero_stage >= ZeroStage.PARAMETERS and len(mesh.peers) > 1
    kept = mesh.held
    if is_dealt_out:
        kept = tuple(parameter for parameter in kept if parameter.owner(mesh.stage) == mesh.data_index)
    return frozenset(parameter.name for parameter in kept)


def tied_groups(plan: Plan, parameter: HeldParameter) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks over each of which the gradient of a parameter with several copies is summed.

    Where no stage shards and all have the same data-parallel degree, equal data-parallel indices form a group and every
    copy gets the sum at once. Otherwise one data-parallel index of each stage speaks for it; see
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
    """Whether a stage's speakers must hand the summed gradient of a tied parameter to their data-parallel peers."""
    is_sharded = plan.stages[stage].zero_stage >= ZeroStage.OPTIMIZER
    return not is_sharded and plan.stages[stage].data_parallel_degree > 1 and not _is_aligned(plan, parameter)


def process_groups(plan: Plan, module_map: ModuleMap) -> tuple[tuple[int, ...], ...]:
    """Every group that a run of the plan needs, in an order that is the same on all ranks.

    The world; the ranks of each replica; the data-parallel ranks of each stage by tensor-parallel index, and the
    tensor-parallel ranks by data-parallel index; the ranks that sum tied gradients.
    """
    groups = [tuple(range(plan.world_size))]
    groups += [replica_ranks(plan, replica) for replica in range(plan.num_replicas)]
    for index, stage in enumerate(plan.stages[: plan.num_groups]):
        groups += [stage_ranks(plan, index, tensor) for tensor in range(stage.mesh.tensor_parallel_degree)]
        groups += [tensor_ranks(plan, index, data) for data in range(stage.data_parallel_degree)]
    for parameter in held_parameters(plan, module_map):
        if parameter.requires_grad and len(parameter.stages) > 1:
            groups += tied_groups(plan, parameter)
    return tuple(dict.fromkeys(tuple(sorted(group)) for group in groups if len(group) > 1))


def talking_groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Those groups whose ranks tell each other what is not on a device: objects, and what batches look like."""
    groups = [tuple(range(plan.world_size)), *(replica_ranks(plan, index) for index in range(plan.num_replicas))]
    return tuple(dict.fromkeys(group for group in groups if len(group) > 1))


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
    for index, peer in enumerate(stage_ranks(plan, neighbour)):
        if replica_of(plan, peer) != replica:
            continue
        theirs = row_slice(plan, peer, microbatch)
        low, high = _rows(theirs, microbatch, batch_rows)
        low, high = max(first, low), min(end, high)
        if theirs.owner == mine.owner and low < high:
            ranks = tensor_ranks(plan, neighbour, index)
            found.append(Overlap(ranks=ranks, first=low - first, end=high - first))
    return tuple(sorted(found, key=lambda overlap: overlap.first))


def side_of(plan: Plan, stage: int, live: LiveTensor) -> Side:
    """How the tensor-parallel ranks of a stage hold a tensor that crosses one of its boundaries."""
    mesh = plan.stages[stage].mesh
    is_shared = mesh.sequence_parallel and live.sequence_dim is not None
    return Side(degree=mesh.tensor_parallel_degree, is_shared=is_shared)


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


def _speaking(plan: Plan, parameter: HeldParameter, stage: int) -> tuple[int, ...]:
    """Data-parallel indices of a stage that take part in the sum of a tied parameter's gradients."""
    if _is_aligned(plan, parameter):
        return tuple(range(plan.stages[stage].data_parallel_degree))
    return (parameter.owner(stage),)


def _is_aligned(plan: Plan, parameter: HeldParameter) -> bool:
    stages = [plan.stages[stage] for stage in parameter.stages]
    degrees = {stage.data_parallel_degree for stage in stages}
    return len(degrees) == 1 and all(stage.zero_stage < ZeroStage.OPTIMIZER for stage in stages)


def _nbytes(use: ParameterUse) -> int:
    return prod(use.shape) * itemsize(use.dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one element of a type, by torch's name of it: the first number in the name counts its bits."""
    if dtype == "bool":
        return 1
    bits = re.search(r"\d+", dtype)
    if bits is None:
        raise PlanError(f"dtype {dtype!r}: a type of elements that says how many bits it has, such as float32")
    return int(bits[0]) // 8


MESSAGE_CHANNELS = 4
"""Most channels of a message's kernel, which spins on one multiprocessor each until the other end is there: a receive
is posted a computation early. Not measured on a device yet."""


def message_pairs(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Every pair of ranks of which the first sends to the second; sorted, the same whoever asks.

    Activations go to the next stage, gradients back.
    """
    pairs = {pair for stage in range(plan.num_stages - 1) for pair in _crossing(plan, stage, stage + 1)}
    return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))


def _crossing(plan: Plan, stage: int, following: int) -> Iterator[tuple[int, int]]:
    """Who sends to whom between two stages: ranks that compute on the same rows and hold the same part."""
    first, second = plan.stages[stage], plan.stages[following]
    mine, theirs = first.data_parallel_degree, second.data_parallel_degree
    for here, there in product(range(mine), range(theirs)):
        # Data-parallel index j of d has the rows from j / d to (j + 1) / d of every microbatch.
        if here * theirs >= (there + 1) * mine or there * mine >= (here + 1) * theirs:
            continue
        before, after = tensor_ranks(plan, stage, here), tensor_ranks(plan, following, there)
        # Tensors that have no sequence, and states of generators, are held whole also where others are in parts.
        # So are sequences on a side that their length cannot be divided by.
        for are_shared in product({first.mesh.sequence_parallel, False}, {second.mesh.sequence_parallel, False}):
            degrees = len(before), len(after)
            sides = [Side(degree=n, is_shared=shared) for n, shared in zip(degrees, are_shared, strict=True)]
            yield from ((before[source], after[index]) for source, index in _portions(*sides))
            yield from ((after[source], before[index]) for source, index in _portions(*reversed(sides)))


def _portions(mine: Side, theirs: Side) -> Iterator[tuple[int, int]]:
    """Tensor-parallel indices of one side that send to which of the other."""
    length = mine.degree * theirs.degree  # divisible, as sequences that are shared out are
    for index in range(theirs.degree):
        for source, _, _ in theirs.sources(index, mine, length):
            yield source, index
