"""Stages of one plan priced together: those that are alike but for their layers and savings make one array.

Every question to the cost model takes about as long for one candidate as for a hundred, so the stages of a plan are
asked about in as few questions as there are kinds of places in its pipeline.

Array axes
    K  candidates, of every stage as many as it came with, stage after stage
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, replace

from lightning_mist.cost.candidates import Placed, StageCandidates, StageSlot
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.mixed import CostModel
from lightning_mist.cost.needs import StageNeeds
from lightning_mist.cost.stage import StageSeconds
from lightning_mist.plan import ZeroStage

__all__ = ["Placed", "needs_of_stages", "seconds_of_stages"]


def seconds_of_stages(model: CostModel, stages: Sequence[Placed]) -> tuple[StageSeconds, ...]:
    """Seconds of each stage's candidates, as if each had been asked for by itself.

    Args:
        model: The cost model.
        stages: The stages of a pipeline, or some of them; or those of several.
    """
    names = [field.name for field in fields(StageSeconds)]
    groups = tuple(_joined(stages, _pace_key))
    answers = model.seconds_of([(slot, candidates) for _, slot, candidates in groups])
    found: dict[int, StageSeconds] = {}
    for (members, _, _), seconds in zip(groups, answers, strict=True):
        first = 0
        for index in members:
            cut = slice(first, first + len(stages[index][1]))
            found[index] = StageSeconds(**{name: getattr(seconds, name)[cut] for name in names})
            first = cut.stop
    return tuple(found[index] for index in range(len(stages)))


def needs_of_stages(model: Callable[[StageSlot], MemoryModel], stages: Sequence[Placed]) -> tuple[StageNeeds, ...]:
    """What the memory of each stage's candidates is made of, as if each had been asked for by itself.

    Args:
        model: Memory of stages of the network, by slot.
        stages: The stages of a pipeline, or some of them.
    """
    found: dict[int, StageNeeds] = {}
    for members, slot, candidates in _joined(stages, _bytes_key):
        needs, first = model(slot).needs(slot, candidates), 0
        for index in members:
            cut = slice(first, first + len(stages[index][1]))
            found[index] = needs.take(cut)
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
    """What needs depend on: of the slot rows, degrees, batches, and whether there are several stages."""
    return replace(slot, stage_index=0, behind=None, parts=(), placement=None)
