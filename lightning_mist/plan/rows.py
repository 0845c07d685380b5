"""Which rows of whose batch a rank computes on: virtual data-parallel ranks.

Every rank keeps loading the batch that plain data parallelism would give it. A *replica* of the pipeline is a set of
ranks that together hold the model ``num_replicas`` times less often than the world; its ranks' batches, in rank order,
are the replica's rows. They are cut into ``num_microbatches`` microbatches; within a stage of the replica each
data-parallel rank takes an equal part of every microbatch. A part never mixes the batches of two ranks.

With ``R`` replicas, ``G`` microbatches and a stage of data-parallel degree ``d = R * d'``, data-parallel index
``j = r * d' + j'`` computes in microbatch ``g`` on chunk ``g * d' + j'`` of the ``G * d'`` chunks of replica ``r``. The
same rows make up microbatch ``g`` at every stage, whatever the degrees, so boundaries only re-slice inside a replica.
"""

from dataclasses import dataclass

from lightning_mist.errors import PlanError
from lightning_mist.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Part ``part`` of ``parts`` equal parts of the batch that rank ``owner`` loaded."""

    owner: int
    part: int
    parts: int

    def rows(self, batch_rows: int) -> tuple[int, int]:
        """Half-open range of rows in the owner's batch of ``batch_rows`` rows; parts differ by at most one row."""
        return batch_rows * self.part // self.parts, batch_rows * (self.part + 1) // self.parts


def replica_of(plan: Plan, rank: int) -> int:
    """Index of the pipeline replica that a global rank works for."""
    stage = plan.stages[plan.stage_of(rank)]
    index = stage.devices.index(rank) // (len(stage.devices) // stage.data_parallel_degree)
    return index // (stage.data_parallel_degree // plan.num_replicas)


def replica_ranks(plan: Plan, replica: int) -> tuple[int, ...]:
    """Global ranks of a replica, ascending. Their batches are the replica's rows, in this order."""
    return tuple(rank for rank in range(plan.world_size) if replica_of(plan, rank) == replica)


def row_slice(plan: Plan, rank: int, microbatch: int, *, owners: tuple[int, ...] | None = None) -> RowSlice:
    """The rows on which ``rank`` computes in ``microbatch``.

    Args:
        owners: The ranks of its replica where these are known, which takes long to find out for many devices.

    Raises:
        PlanError: If a part would mix the batches of several ranks.
    """
    stage_index = plan.stage_of(rank)
    stage = plan.stages[stage_index]
    owners = owners or replica_ranks(plan, replica_of(plan, rank))
    per_replica = stage.data_parallel_degree // plan.num_replicas
    chunks = plan.num_microbatches * per_replica
    if chunks % len(owners):
        raise PlanError(
            f"stage {stage_index}: {plan.num_microbatches} microbatches x {per_replica} data-parallel ranks in a "
            f"replica = {chunks} parts of the batches of {len(owners)} ranks: a part may not mix two batches, so the "
            f"number of parts must be a multiple of {len(owners)}"
        )
    parts = chunks // len(owners)
    width = len(stage.devices) // stage.data_parallel_degree
    chunk = microbatch * per_replica + stage.devices.index(rank) // width % per_replica
    return RowSlice(owner=owners[chunk // parts], part=chunk % parts, parts=parts)
