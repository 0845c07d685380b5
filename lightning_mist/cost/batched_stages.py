"""Stages of one plan or of many priced together: those that are alike but for their layers and savings make one array.

Every question to the cost model takes about as long for one candidate as for a hundred, so stages are asked about in as
few questions as there are kinds of places among them. Most of what a stage takes does not depend on the pipeline around
it: not on its place there, nor on the number of microbatches, as long as it is more than one (but where parameters are
unsharded, which are there from one microbatch to the next as far as those in flight allow). Only what it exchanges with
other stages depends on where they lie, so that is asked about apart.

Array axes
    K  candidates, of every stage as many as it came with, stage after stage
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from lightning_mist.cost.inputs import (
    ArrayRecord,
    FloatArray,
    IntArray,
    Placed,
    StageCandidates,
    StageSlot,
    placed_slots_of,
)
from lightning_mist.cost.memory import MemoryModel, PeakParts, StageNeeds
from lightning_mist.cost.mixed_model import CostModel, profiles_of
from lightning_mist.cost.time import EXCHANGED, TOLD, StageSeconds
from lightning_mist.plan import Plan, ZeroStage

Terms: TypeAlias = dict[str, float]
"""Seconds of one stage by term."""

_Key = TypeVar("_Key", bound=Hashable)

_TERMS = tuple(f"{name[:-2]}_seconds" for name in TOLD)


def terms_of_plans(model: CostModel, plans: Sequence[Plan]) -> list[list[Terms]]:
    """Seconds of every stage of some plans by term."""
    stages = [placed for plan in plans for placed in placed_slots_of(plan, model.cluster)]
    if not stages:
        return []
    seconds = _seconds(model, stages)
    rows = zip(*(getattr(seconds, name).tolist() for name in TOLD), strict=True)
    terms = (dict(zip(_TERMS, row, strict=True)) for row in rows)
    return [[next(terms) for _ in plan.stages] for plan in plans]


def seconds_of_stages(model: CostModel, stages: Sequence[Placed]) -> tuple[StageSeconds, ...]:
    """Seconds of each stage's candidates, as if each had been asked for by itself."""
    if not stages:
        return ()
    found = _seconds(model, stages)
    return tuple(found.take(slice(*ends)) for ends in pairwise(_begins(stages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts(ArrayRecord):
    """What candidates cost.

    Attributes:
        own_times_K: Steady and boundary seconds, in two rows, but for what is exchanged with other stages.
        exchanged_times_K: What is.
        again_K: What every further stage behind adds to steady seconds.
        unhidden_K: Of the boundary seconds those that copies cannot hide.
        parts: What peaks are made of.
    """

    own_times_K: FloatArray
    exchanged_times_K: FloatArray
    again_K: FloatArray
    unhidden_K: FloatArray
    parts: PeakParts


def evaluate(model: CostModel, stages: Sequence[Placed]) -> StageCosts:
    """What the candidates of at least one stage cost, those of all stages in one record."""
    seconds = _seconds(model, stages)
    parts = [(members, PeakParts.of(needs)) for members, needs in _needs(model.memory, stages)]
    hidden_K = np.minimum(seconds.gather_K, seconds.forward_K + seconds.update_K)
    if any(profile.corrections for profile in profiles_of(model)):
        hidden_K = seconds.gather_K + seconds.reduce_K
    return StageCosts(
        own_times_K=seconds.own_times_K,
        exchanged_times_K=seconds.exchanged_times_K,
        again_K=seconds.again_K,
        unhidden_K=seconds.boundary_K - seconds.update_copies_K - hidden_K,
        parts=PeakParts.joined([found for _, found in parts]).take(_order(stages, [members for members, _ in parts])),
    )


def own_seconds(model: CostModel, stages: Sequence[Placed]) -> StageSeconds:
    """Seconds of the candidates of at least one stage but for exchange with others, in one record."""
    own = _groups((_own_slot(*placed), placed[1].offload is None) for placed in stages)
    answers = model.seconds_of([(slot, _candidates(stages, members)) for (slot, _), members in own.items()])
    return StageSeconds.joined(answers).take(_order(stages, own.values()))


def _seconds(model: CostModel, stages: Sequence[Placed]) -> StageSeconds:
    """Seconds of the candidates of at least one stage, in one record."""
    begins, found = _begins(stages), own_seconds(model, stages)
    exchanged_by_term_K = np.empty((len(EXCHANGED), begins[-1]))
    for members in _groups(_exchange_key(slot) for slot, _ in stages).values():
        exchanged = model.exchanged(stages[members[0]][0], _candidates(stages, members))
        exchanged_by_term_K[:, _places(begins, members)] = exchanged
    return replace(found, **dict(zip(EXCHANGED, exchanged_by_term_K, strict=True)))


def _own_slot(slot: StageSlot, candidates: StageCandidates) -> StageSlot:
    """A slot in which stages take as long, but for what they exchange with others."""
    # Unsharding depends on when which microbatch is run, and splitting backwards may take operators of its own.
    unshards = int(candidates.zero_stage_K.max(initial=0)) >= ZeroStage.PARAMETERS
    # Groups of devices with several chunks, or all forwards first, unshard as often wherever they are.
    is_anywhere = not unshards or slot.schedule in ("gpipe", "interleaved-1f1b")
    several = min(2, slot.num_stages)
    count = slot.num_microbatches if unshards else min(2, slot.num_microbatches)
    place = slot.placement
    return replace(
        slot,
        stage_index=0,
        num_stages=several,
        num_microbatches=count,
        # Of the number of loaders it counts whether there are several.
        batch_rows=1 if slot.loaders > 1 else count * slot.data_parallel_degree * slot.rows,
        replicas=1,
        schedule=slot.schedule if unshards or slot.schedule == "zb-h1" else "1f1b",
        parts=(slot.part,) * several if slot.parts else (),
        placement=place and replace(place, tied_nodes=1, share=1.0, before=None, behind=None),
        behind=0 if is_anywhere else min(slot.stages_behind, slot.num_microbatches - 1),
    )


def _exchange_key(slot: StageSlot) -> Hashable:
    """What seconds of exchanges with other stages depend on: over which boundaries, and what crosses them."""
    degrees = (slot.data_parallel_degree, slot.tensor_parallel_degree, slot.context_parallel_degree)
    return slot.rows, degrees, slot.sequence_parallel, slot.num_stages > 1, slot.placement, slot.part, slot.seams


def needs_of_stages(model: Callable[[StageSlot], MemoryModel], stages: Sequence[Placed]) -> tuple[StageNeeds, ...]:
    """What each stage's candidates need, as if each had been asked for by itself."""
    found: dict[int, StageNeeds] = {}
    for members, needs in _needs(model, stages):
        for index, ends in zip(members, pairwise(_begins([stages[index] for index in members])), strict=True):
            found[index] = needs.take(slice(*ends))
    return tuple(found[index] for index in range(len(stages)))


def _needs(
    model: Callable[[StageSlot], MemoryModel], stages: Sequence[Placed]
) -> Iterator[tuple[list[int], StageNeeds]]:
    """Some of the stages, and what their candidates need, one after another."""
    for members in _groups(_bytes_key(*placed) for placed in stages).values():
        memory = model(stages[members[0]][0])
        needs = memory.needs(stages[members[0]][0], _candidates(stages, members))
        each = [np.full(len(some), memory.batch_bytes(slot)) for slot, some in (stages[index] for index in members)]
        yield members, replace(needs, always={**needs.always, "batch_bytes": np.concatenate(each)})


def _bytes_key(slot: StageSlot, candidates: StageCandidates) -> Hashable:
    """What needs but for batches depend on: of the slot rows, degrees, and whether there are several of what."""
    degrees = (slot.data_parallel_degree, slot.tensor_parallel_degree, slot.context_parallel_degree, slot.shard_group)
    several = (slot.num_stages > 1, slot.num_microbatches > 1, slot.schedule == "zb-h1")
    return slot.rows, degrees, slot.sequence_parallel, slot.method, several, candidates.offload is None


def _groups(keys: Iterable[_Key]) -> dict[_Key, list[int]]:
    """Indices of what has equal keys."""
    found: dict[_Key, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return found


def _candidates(stages: Sequence[Placed], members: Sequence[int]) -> StageCandidates:
    """The candidates of some stages, one after another."""
    return StageCandidates.joined([stages[index][1] for index in members])


def _begins(stages: Sequence[Placed]) -> list[int]:
    """Where the candidates of each stage begin among all, and how many there are."""
    return [0, *accumulate(len(candidates) for _, candidates in stages)]


def _order(stages: Sequence[Placed], groups: Iterable[Sequence[int]]) -> IntArray | slice:
    """Where the candidates of every stage are in what has those of groups of stages one after another."""
    begins, found = _begins(stages), [*groups]
    return slice(None) if len(found) == 1 else np.argsort(np.concatenate([_places(begins, some) for some in found]))


def _places(begins: Sequence[int], members: Sequence[int]) -> IntArray:
    """Where the candidates of some stages are among those of all."""
    return np.concatenate([np.arange(begins[index], begins[index + 1]) for index in members])
