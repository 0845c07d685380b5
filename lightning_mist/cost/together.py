"""Stages of one plan priced together: those that are alike but for their layers and savings make one array.

Every question to the cost model takes about as long for one candidate as for a hundred, so the stages of a plan are
asked about in as few questions as there are kinds of places in its pipeline.

Array axes
    K  candidates, of every stage as many as it came with, stage after stage
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.inputs import FloatArray, Placed, StageCandidates, StageSlot
from lightning_mist.cost.memory import (
    MemoryModel,
    Phase,
    StageNeeds,
    host_microbatch_bytes,
    host_state_bytes,
    in_flight,
    stage_phases,
)
from lightning_mist.cost.mixed_model import CostModel
from lightning_mist.cost.time import StageSeconds
from lightning_mist.plan import ZeroStage

__all__ = ["Held", "Placed", "held_of_stages", "needs_of_stages", "seconds_of_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What candidates of a stage hold.

    Attributes:
        needs: What their memory on the device is made of.
        microbatch_K: Host memory of one microbatch's activations.
    """

    needs: StageNeeds
    state_K: FloatArray
    microbatch_K: FloatArray

    def host_bytes(self, slot: StageSlot) -> FloatArray:
        """Host memory of one device of a slot."""
        found_K: FloatArray = self.state_K + in_flight(_phases(slot)) * self.microbatch_K
        return found_K

    def peaks(self, slot: StageSlot) -> tuple[FloatArray, FloatArray]:
        """Peak bytes of one device of a slot, on the device and on the host, in whole bytes."""
        return np.rint(self.needs.peaks(_phases(slot))), np.rint(self.host_bytes(slot))


def _phases(slot: StageSlot) -> tuple[Phase, ...]:
    return stage_phases(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)


def seconds_of_stages(model: CostModel, stages: Sequence[Placed]) -> tuple[StageSeconds, ...]:
    """Seconds of each stage's candidates, as if each had been asked for by itself.

    Args:
        stages: The stages of a pipeline, or some of them; or those of several.
    """
    groups = tuple(_joined(stages, _pace_key))
    answers = model.seconds_of([(slot, candidates) for _, slot, candidates in groups])
    found: dict[int, StageSeconds] = {}
    for (members, _, _), seconds in zip(groups, answers, strict=True):
        first = 0
        for index in members:
            cut = slice(first, first + len(stages[index][1]))
            found[index] = seconds.take(cut)
            first = cut.stop
    return tuple(found[index] for index in range(len(stages)))


def needs_of_stages(model: Callable[[StageSlot], MemoryModel], stages: Sequence[Placed]) -> tuple[StageNeeds, ...]:
    """What the memory of each stage's candidates is made of, as if each had been asked for by itself.

    Args:
        model: Memory of stages of the network, by slot.
        stages: The stages of a pipeline, or some of them; or those of several.
    """
    return tuple(item.needs for item in held_of_stages(model, stages))


def held_of_stages(model: Callable[[StageSlot], MemoryModel], stages: Sequence[Placed]) -> tuple[Held, ...]:
    """As :func:`needs_of_stages`, with what they hold in host memory.

    Args:
        model: As for :func:`needs_of_stages`.
    """
    found: dict[int, Held] = {}
    for members, slot, candidates in _joined(stages, _bytes_key):
        memory, first = model(slot), 0
        needs, state_K = memory.needs(slot, candidates), np.zeros(len(candidates))
        microbatch_K = state_K
        if candidates.offload is not None:
            state_K = host_state_bytes(memory, slot, candidates)
            microbatch_K = host_microbatch_bytes(memory, slot, candidates, needs)
        for index in members:
            cut = slice(first, first + len(stages[index][1]))
            own = _with_batches(needs.take(cut), memory.batch_bytes(stages[index][0]))
            found[index] = Held(needs=own, state_K=state_K[cut], microbatch_K=microbatch_K[cut])
            first = cut.stop
    return tuple(found[index] for index in range(len(stages)))


def _joined(
    stages: Sequence[Placed], key_of: Callable[[StageSlot, StageCandidates], Hashable]
) -> Iterator[tuple[list[int], StageSlot, StageCandidates]]:
    """Stages with equal keys: which they are, the slot of one of them, and the candidates of all."""
    groups: dict[Hashable, list[int]] = {}
    for index, (slot, candidates) in enumerate(stages):
        groups.setdefault((key_of(slot, candidates), candidates.offload is None), []).append(index)
    for members in groups.values():
        yield members, stages[members[0]][0], StageCandidates.joined([stages[index][1] for index in members])


def _pace_key(slot: StageSlot, candidates: StageCandidates) -> Hashable:
    """What seconds depend on: not which stage of a pipeline it is, but with whom it exchanges, and over what."""
    # What is fetched ahead of a stage's forward depends on how many microbatches it starts with.
    is_ahead = candidates.offload is not None or int(candidates.zero_stage_K.max(initial=0)) >= ZeroStage.GRADIENTS
    behind = slot.stages_behind if is_ahead else -1
    return replace(slot, stage_index=0, behind=None), slot.part, slot.seams, behind


def _bytes_key(slot: StageSlot, candidates: StageCandidates) -> Hashable:
    """What needs but for batches depend on: of the slot rows, degrees, and whether there are several of what."""
    degrees = (slot.data_parallel_degree, slot.tensor_parallel_degree, slot.context_parallel_degree)
    several = (slot.num_stages > 1, slot.num_microbatches > 1, slot.schedule == "zb-h1")
    return slot.rows, degrees, slot.sequence_parallel, several


def _with_batches(needs: StageNeeds, batch_bytes: float) -> StageNeeds:
    """Needs with another number of batches that a rank has."""
    if needs.always["batch_bytes"] == batch_bytes:
        return needs
    return replace(needs, always={**needs.always, "batch_bytes": batch_bytes})
