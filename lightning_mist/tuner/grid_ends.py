"""What stages at the ends of grids hold and take, worked out once for batches of all sizes.

As of stages of any pipeline (:mod:`lightning_mist.tuner.pieces`) most of it depends on the layers, the arrangement of
devices and the rows that each of them sees per microbatch only.

Array axes
    K  settings
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.inputs import FloatArray, Kept
from lightning_mist.cost.memory import PeakParts, stage_phases
from lightning_mist.cost.time import Unsharding

MOST = 512
"""Stages of which it is kept; each takes a few dozen kilobytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Seconds of a microbatch.

    Attributes:
        alone_K: Those without exchange with other stages, and without unsharding.
        shards: What unsharding adds.
        accumulate_K: What the first microbatch saves.
    """

    alone_K: FloatArray
    shards: Unsharding
    accumulate_K: FloatArray


def _kept_parts() -> Kept[Hashable, PeakParts]:
    return Kept(MOST)


def _kept_paces() -> Kept[Hashable, _Pace]:
    return Kept(MOST)


@dataclass(frozen=True, slots=True)
class KnownEnds:
    """What is known of stages of one network on like devices.

    Attributes:
        parts: What their peaks are made of, without the batch.
        paces: Their seconds.
    """

    parts: Kept[Hashable, PeakParts] = field(default_factory=_kept_parts)
    paces: Kept[Hashable, _Pace] = field(default_factory=_kept_paces)

    def peaks(self, model: CostModel, slot: StageSlot, candidates: StageCandidates) -> FloatArray:
        """Peak bytes of a stage under every setting.

        Args:
            model: The cost model.
            slot: The stage's place.
            candidates: The stage with every setting.
        """
        memory = model.memory(slot)

        def find(_: Hashable) -> PeakParts:
            return PeakParts.of(memory.needs(slot, candidates)).beside(-memory.batch_bytes(slot))

        phases = stage_phases(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
        return self.parts.of(_key(slot, candidates), find).beside(memory.batch_bytes(slot)).peaks(phases)

    def busy(self, model: CostModel, slot: StageSlot, candidates: StageCandidates) -> FloatArray:
        """Seconds of a step in which a stage's devices are busy under every setting, without transfers.

        Args:
            model: As for :meth:`peaks`.
            slot: Likewise.
            candidates: Likewise.
        """

        def find(_: Hashable) -> _Pace:
            seconds, shards = model.parted_seconds(slot, candidates)
            return _Pace(alone_K=seconds.alone_K, shards=shards, accumulate_K=seconds.accumulate_K)

        pace = self.paces.of(_key(slot, candidates), find)
        busy_K: FloatArray = slot.num_microbatches * (pace.alone_K + pace.shards.seconds(slot)) - pace.accumulate_K
        return busy_K


def _key(slot: StageSlot, candidates: StageCandidates) -> Hashable:
    """All that both depend on beside the network and its devices."""
    offload = candidates.offload
    moved = () if offload is None else tuple(getattr(offload, name).tobytes() for name in offload.__slots__)
    return (
        (slot.rows, slot.data_parallel_degree, slot.tensor_parallel_degree, slot.sequence_parallel),
        (slot.context_parallel_degree, slot.replicas, slot.parts, slot.placement),
        (slot.num_stages > 1, slot.num_microbatches > 1, slot.world_size, slot.schedule),
        (candidates.start_K.tobytes(), candidates.end_K.tobytes()),
        (candidates.checkpointed_K.tobytes(), candidates.zero_stage_K.tobytes(), *moved),
    )
