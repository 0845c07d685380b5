"""What is asked of the cost model: stages at one place of a pipeline, many at once."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs.arrays import ArrayRecord
from lightning_mist.cost.inputs.expressions import BoolArray, FloatArray, IntArray
from lightning_mist.cost.inputs.placement import Placement, parts_of, placements_of
from lightning_mist.hardware import AnyCluster, MixedCluster
from lightning_mist.plan import AS_IT_IS, OFFLOAD_KINDS, OffloadRatios, Plan, ScheduleName, StageMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlot:
    """A place in a pipeline with everything that is fixed before layers and memory savings are chosen.

    Attributes:
        rows: Rows that each of them sees per microbatch.
        batch_rows: Rows of the batch of each loader; all loaders together bring ``num_microbatches *
            data_parallel_degree * rows``.
        replicas: Number of independent copies of the pipeline, or a number that it is at least; the fewer there are,
            the more ranks exchange their batches.
        tensor_parallel_degree: Devices that share every layer for each data-parallel rank.
        method: How it computes what it computes.
        context_parallel_degree: Devices that share the sequence of every row for each data-parallel rank.
        shard_group: Ranks that share out what ZeRO shards, if not all with the same parameters (hybrid sharding).
        parts: The part of a cluster of unlike devices in which each stage of the pipeline lies; nothing if devices are
            alike, or the only stage has all of them.
        behind: Stages behind this one of which microbatches come back, if not those of the pipeline.
    """

    stage_index: int
    num_stages: int
    num_microbatches: int
    data_parallel_degree: int
    rows: int
    batch_rows: int
    replicas: int = 1
    schedule: ScheduleName = "1f1b"
    tensor_parallel_degree: int = 1
    sequence_parallel: bool = False
    method: StageMethod = AS_IT_IS
    context_parallel_degree: int = 1
    shard_group: int | None = None
    parts: tuple[int, ...] = ()
    placement: Placement | None = None
    behind: int | None = None

    @property
    def part(self) -> int:
        """The part of the cluster in which the stage lies."""
        return self.parts[self.stage_index] if self.parts else 0

    @property
    def stages_behind(self) -> int:
        """Stages behind this one."""
        return self.num_stages - 1 - self.stage_index if self.behind is None else self.behind

    @property
    def computed(self) -> tuple[float, int, bool, StageMethod]:
        """What seconds of its regions depend on."""
        return self.whole_rows, self.tensor_parallel_degree, self.sequence_parallel, self.method

    @property
    def devices(self) -> int:
        """Devices of the stage."""
        return self.num_peers * self.tensor_parallel_degree

    def seam(self, first: int, second: int) -> tuple[int, int] | None:
        """The parts in which two stages lie, if they differ."""
        if not self.parts or self.parts[first] == self.parts[second]:
            return None
        return self.parts[first], self.parts[second]

    @property
    def seams(self) -> tuple[tuple[int, int] | None, ...]:
        """Over which pairs of unlike parts it exchanges: with the stages in front and behind, and tied parameters."""
        index, last = self.stage_index, self.num_stages - 1
        pairs = ((index - 1, index), (index, index + 1), (0, last))
        return tuple(self.seam(*pair) if pair[0] >= 0 and pair[1] <= last else None for pair in pairs)

    @property
    def whole_rows(self) -> float:
        """Rows with as many tokens as a device computes on in one microbatch.

        Devices that share a sequence each do an equal part of all that is done to it, attention included: what is not
        equal about that is priced apart.
        """
        return self.rows / self.context_parallel_degree

    @property
    def num_peers(self) -> int:
        """Ranks with the same parameters: data times context parallelism."""
        return self.data_parallel_degree * self.context_parallel_degree

    @property
    def shard_degree(self) -> int:
        """Ranks that share out what ZeRO shards: all with the same parameters, or those of a group."""
        return self.shard_group or self.num_peers

    @property
    def loaders(self) -> int:
        """Distinct batches that are loaded at once."""
        return self.num_microbatches * self.data_parallel_degree * self.rows // self.batch_rows

    @property
    def batches_held(self) -> int:
        """The most batches, its own and those it computes on, that a rank has: whole ones travel inside a replica.

        A rank computes on one part of one batch per microbatch.
        """
        return min(self.loaders // self.replicas, self.num_microbatches + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCandidates(ArrayRecord):
    """Fractions in [0, 1] of each kind of state that live in host memory; every array has the axis ``K``.

    What they mean is said in :mod:`lightning_mist.cost.memory.offload_bytes`.

    Attributes:
        activations_K: Of what layers keep for backward that are not recomputed.
        checkpoints_K: Of what recomputed ones do.
    """

    parameters_K: FloatArray
    gradients_K: FloatArray
    optimizer_K: FloatArray
    activations_K: FloatArray
    checkpoints_K: FloatArray

    @classmethod
    def of(cls, ratios: OffloadRatios, count: int = 1) -> "OffloadCandidates":
        """The same ratios for a number of candidates."""
        return cls.of_kinds(np.tile([ratios.of(kind) for kind in OFFLOAD_KINDS], (count, 1)))

    @classmethod
    def of_kinds(cls, ratio_KO: FloatArray) -> "OffloadCandidates":
        """Ratios of kinds of state, which have the axis ``O``."""
        return cls(**{f"{kind}_K": ratio_KO[:, place] for place, kind in enumerate(OFFLOAD_KINDS)})

    @property
    def kept_ratios(self) -> FloatArray:
        """Those of what layers keep for backward, not recomputed ones first."""
        return np.stack([self.activations_K, self.checkpoints_K], axis=1)

    @property
    def is_updated_by_units_K(self) -> BoolArray:
        """Whether units are updated one after another: where parameters, gradients or optimizer state are offloaded."""
        return (self.parameters_K > 0) | (self.gradients_K > 0) | (self.optimizer_K > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCandidates(ArrayRecord):
    """Choices for one slot; every array has the axis ``K``.

    Attributes:
        checkpointed_K: How many of the first layers are recomputed in backward.
        variant_K: Where several variants of the network are asked about at once: which of them each is of.
    """

    start_K: IntArray
    end_K: IntArray
    checkpointed_K: IntArray
    zero_stage_K: IntArray
    offload: OffloadCandidates | None = None
    variant_K: IntArray | None = None


Placed: TypeAlias = tuple[StageSlot, StageCandidates]
"""A place in a pipeline and what may be there."""


def placed_slots_of(plan: Plan, cluster: AnyCluster | int) -> tuple[tuple[StageSlot, StageCandidates], ...]:
    """As :func:`slots_of`, with the places of devices on the nodes of a cluster, or on nodes of one size.

    Raises:
        PlanError: If one of several stages lies in several parts of the cluster.
    """
    placements = placements_of(plan, cluster)
    return tuple(
        (replace(slot, placement=placement), candidates)
        for (slot, candidates), placement in zip(slots_of(plan, cluster), placements, strict=True)
    )


def slots_of(plan: Plan, cluster: AnyCluster | int = 1) -> tuple[tuple[StageSlot, StageCandidates], ...]:
    """Each stage of a plan as a slot with one candidate.

    Raises:
        PlanError: If one of several stages lies in several parts of the cluster.
    """
    parts = parts_of(plan, cluster) if isinstance(cluster, MixedCluster) else ()
    batch_rows, replicas = max(1, plan.global_batch_size // plan.num_loaders), plan.num_replicas
    return tuple(
        (
            StageSlot(
                stage_index=index,
                num_stages=plan.num_stages,
                num_microbatches=plan.num_microbatches,
                data_parallel_degree=stage.data_parallel_degree,
                rows=stage.microbatch_size,
                batch_rows=batch_rows,
                replicas=replicas,
                schedule=plan.schedule,
                tensor_parallel_degree=stage.mesh.tensor_parallel_degree,
                sequence_parallel=stage.mesh.sequence_parallel,
                method=stage.method,
                context_parallel_degree=stage.mesh.context_parallel_degree,
                shard_group=stage.mesh.shard_degree,
                parts=parts,
            ),
            StageCandidates(
                start_K=np.array([stage.layers[0]]),
                end_K=np.array([stage.layers[1]]),
                checkpointed_K=np.array([stage.checkpointing.layers]),
                zero_stage_K=np.array([int(stage.zero_stage)]),
                offload=OffloadCandidates.of(stage.offload) if stage.offload.any else None,
            ),
        )
        for index, stage in enumerate(plan.stages)
    )
