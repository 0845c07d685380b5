"""Which rows of whose batch a rank computes on: virtual data-parallel ranks.

By default every rank loads the batch that plain data parallelism would give it. With fewer loaders than ranks, groups
of as many neighbouring ranks load the same batch each. A *replica* of the pipeline is a set of ranks that together hold
the model ``num_replicas`` times less often than the world; it computes on the batches of as many loaders as all others.
For each of these loaders one of its ranks is the *feeder*, whose copy of the batch is the one that counts. In the order
of feeders their batches are the replica's rows. They are cut into ``num_microbatches`` microbatches; within a stage of
the replica each data-parallel rank takes an equal part of every microbatch. A part never mixes two batches.

With ``R`` replicas, ``G`` microbatches and a stage of data-parallel degree ``d = R * d'``, data-parallel index
``j = r * d' + j'`` computes in microbatch ``g`` on chunk ``g * d' + j'`` of the ``G * d'`` chunks of replica ``r``. The
same rows make up microbatch ``g`` at every stage, whatever the degrees, so boundaries only re-slice inside a replica.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_mist.errors import PlanError
from lightning_mist.plan.module_map import Feature, ModuleMap
from lightning_mist.plan.plan import AS_IT_IS, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Part ``part`` of ``parts`` equal parts of the batch that rank ``owner`` loaded or feeds."""

    owner: int
    part: int
    parts: int

    def rows(self, batch_rows: int) -> tuple[int, int]:
        """Half-open range of rows in the owner's batch of ``batch_rows`` rows; parts differ by at most one row."""
        return batch_rows * self.part // self.parts, batch_rows * (self.part + 1) // self.parts


def loader_of(plan: Plan, rank: int) -> int:
    """Index of the data loader whose samples a global rank loads."""
    return rank * plan.num_loaders // plan.world_size


def loader_ranks(plan: Plan, loader: int) -> tuple[int, ...]:
    """Global ranks that load the samples of a loader, ascending."""
    count = plan.world_size // plan.num_loaders
    return tuple(range(loader * count, (loader + 1) * count))


def replica_of(plan: Plan, rank: int) -> int:
    """Index of the pipeline replica that a global rank works for."""
    stage, index = plan.place_of(rank)
    return index // (len(plan.stages[stage].devices) // plan.num_replicas)


def replica_ranks(plan: Plan, replica: int) -> tuple[int, ...]:
    """Global ranks of a replica, ascending."""
    return _replicas(plan)[replica]


@lru_cache(maxsize=8)
def _replicas(plan: Plan) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(plan.num_replicas)]
    for stage in plan.stages[: plan.num_groups]:
        count = len(stage.devices) // plan.num_replicas
        for index, rank in enumerate(stage.devices):
            found[index // count].append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in found)


@lru_cache(maxsize=8)
def feeders(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The ranks of every replica whose batches are its rows, in this order, which is ascending.

    Without ``data_parallel_size`` these are all its ranks. Each loader's group has a rank in the replica that it feeds,
    and each replica as many loaders. There always is such an assignment: groups are of one size and replicas too, so
    that any groups together have ranks in at least as large a share of the replicas as they are of the groups (Hall's
    theorem). It is found along augmenting paths.
    """
    replicas = _replicas(plan)
    if plan.data_parallel_size is None:
        return replicas
    most = plan.num_loaders // plan.num_replicas
    home = {rank: replica for replica, ranks in enumerate(replicas) for rank in ranks}
    feeding: list[dict[int, int]] = [{} for _ in replicas]  # by loader: the rank that feeds
    for loader in range(plan.num_loaders):
        _give_place(plan, loader, home, feeding, most)
    return tuple(tuple(sorted(ranks.values())) for ranks in feeding)


def _give_place(plan: Plan, loader: int, home: dict[int, int], feeding: list[dict[int, int]], most: int) -> None:
    """Assign one more loader to a replica, for which others may have to change to another one."""
    reached: dict[int, tuple[int, int]] = {}  # by replica: the loader that would come to it, with which rank
    waiting = deque([loader])
    while waiting:
        moving = waiting.popleft()
        for rank in loader_ranks(plan, moving):
            replica = home[rank]
            if replica in reached:
                continue
            reached[replica] = moving, rank
            if len(feeding[replica]) < most:
                _follow(replica, loader, reached, feeding)
                return
            waiting.extend(feeding[replica])
    raise AssertionError("groups of one size always find replicas of one size")


def _follow(replica: int, loader: int, reached: dict[int, tuple[int, int]], feeding: list[dict[int, int]]) -> None:
    """Move the loaders on the path that ended in ``replica``."""
    moving, feeding[replica][moving] = reached[replica]
    while moving != loader:
        replica = next(number for number, found in enumerate(feeding) if moving in found and number != replica)
        del feeding[replica][moving]
        moving, feeding[replica][moving] = reached[replica]


def row_slice(plan: Plan, rank: int, microbatch: int) -> RowSlice:
    """The rows on which ``rank`` computes in ``microbatch``.

    Raises:
        PlanError: If a part would mix the batches of several ranks.
    """
    stage_index, index = plan.place_of(rank)
    stage = plan.stages[stage_index]
    owners = feeders(plan)[replica_of(plan, rank)]
    per_replica = stage.data_parallel_degree // plan.num_replicas
    chunks = plan.num_microbatches * per_replica
    if chunks % len(owners):
        raise PlanError(
            f"stage {stage_index}: {plan.num_microbatches} microbatches x {per_replica} data-parallel ranks in a "
            f"replica = {chunks} parts of the batches of {len(owners)} ranks: a part may not mix two batches, so the "
            f"number of parts must be a multiple of {len(owners)}; or fewer ranks load batches of their own, with "
            f"data_parallel_size={plan.num_replicas}"
        )
    parts = chunks // len(owners)
    width = len(stage.devices) // stage.data_parallel_degree
    chunk = microbatch * per_replica + index // width % per_replica
    return RowSlice(owner=owners[chunk // parts], part=chunk % parts, parts=parts)


def parts_of(plan: Plan) -> tuple[int, ...]:
    """For each stage, into how many parts it cuts a rank's batch, chunks behind the last layer among them."""
    return tuple(
        stage.tail_chunks * max(row_slice(plan, rank, 0).parts for rank in stage.devices) for stage in plan.stages
    )


def proved_features(plan: Plan, module_map: ModuleMap) -> tuple[Feature, ...]:
    """What a plan does that has to be proved of the module's step."""
    chunks = plan.stages[-1].tail_chunks
    of_rows = max(parts // stage.tail_chunks for parts, stage in zip(parts_of(plan), plan.stages, strict=True))
    found: tuple[tuple[Feature, bool], ...] = (
        ("microbatches", of_rows > 1 or (chunks > 1 and not module_map.cuts_tokens)),
        ("tail_chunks", chunks > 1),
        ("tail_tokens", chunks > 1 and plan.stages[-1].microbatch_size % chunks > 0),
    )
    return tuple(feature for feature, is_used in found if is_used)


@lru_cache(maxsize=8)
def of_whole_batches(plan: Plan) -> Plan | None:
    """The plan by which evaluation runs: every rank's batch is one microbatch, whole, and nothing is recomputed.

    Ranks that share a data loader evaluate its batches each for itself. ``None`` where stages differ in their
    data-parallel degree, so that one of them cuts batches, or where chunks need another number of microbatches.
    """
    degrees = {stage.data_parallel_degree for stage in plan.stages}
    count = plan.world_size // max(degrees)
    if len(degrees) > 1 or (plan.schedule == "interleaved-1f1b" and count % plan.num_groups):
        return None
    stages = (replace(stage, microbatch_size=1, **AS_IT_IS.settings(0)) for stage in plan.stages)
    return replace(
        plan,
        global_batch_size=plan.world_size,
        num_microbatches=count,
        stages=tuple(stages),
        data_parallel_size=None,
        predicted=None,
    )
