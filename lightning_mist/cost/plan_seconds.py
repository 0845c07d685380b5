"""Seconds of the stages of plans by term, worked out once for all plans in which a stage recurs.

Most of what a stage takes does not depend on the pipeline around it: not on its place there, nor on the number of
microbatches, as long as it is more than one (but where parameters are unsharded, which is kept from one microbatch to
the next as far as those in flight allow). Only what it exchanges with other stages depends on where they lie. So the
two are worked out apart, and each is kept by all that it depends on; what is missing of any number of plans is asked
for together.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_mist.cost.inputs import (
    OffloadCandidates,
    Placement,
    StageCandidates,
    StageSlot,
    placed_slots_of,
    placements_of,
)
from lightning_mist.cost.mixed_model import CostModel, MixedCostModel
from lightning_mist.cost.stage_model import StageCostModel
from lightning_mist.cost.time import SHARED, StageSeconds
from lightning_mist.cost.together import seconds_of_stages
from lightning_mist.plan import OffloadRatios, Plan, ScheduleName, StagePlan, ZeroStage

Terms: TypeAlias = dict[str, float]
"""Seconds of one stage by term."""

_NAMES = tuple(field.name for field in fields(StageSeconds))
_TERMS = tuple(f"{name[:-2]}_seconds" for name in _NAMES)


class _Shape(NamedTuple):
    """The devices of a stage and what each computes on at a time."""

    rows: int
    data: int
    tensor: int
    sequence: bool
    context: int
    has_others: bool

    def slot(self, placement: Placement, place: "_Place | None" = None) -> StageSlot:
        """A slot with devices like these."""
        several = 2 if self.has_others else 1
        count = place.microbatches if place else several
        return StageSlot(
            stage_index=0,
            num_stages=several,
            num_microbatches=count,
            data_parallel_degree=self.data,
            rows=self.rows,
            # Of the size of the world it counts whether there is anybody else.
            batch_rows=1 if place is None or place.has_world else count * self.data * self.rows,
            schedule=place.schedule if place else "1f1b",
            tensor_parallel_degree=self.tensor,
            sequence_parallel=self.sequence,
            context_parallel_degree=self.context,
            placement=placement,
            behind=place.behind if place else None,
        )


class _Place(NamedTuple):
    """What else a stage's own seconds depend on, beside what it is itself."""

    shape: _Shape
    shard_nodes: int
    ring_nodes: int
    microbatches: int
    behind: int
    has_world: bool
    schedule: ScheduleName

    @property
    def slot(self) -> StageSlot:
        """A slot in which stages take as long, but for what they exchange with others."""
        alone = Placement(
            shard_nodes=self.shard_nodes, ring_nodes=self.ring_nodes, tied_nodes=1, share=1.0, before=None, behind=None
        )
        return self.shape.slot(alone, self)


class _Stage(NamedTuple):
    """What a stage is."""

    start: int
    end: int
    checkpointed: int
    zero_stage: int
    offload: OffloadRatios | None


class _Own(NamedTuple):
    """A question about a stage by itself."""

    place: _Place
    stage: _Stage


class _Seam(NamedTuple):
    """A question about what a stage exchanges with others."""

    shape: _Shape
    placement: Placement
    start: int
    end: int


def terms_of_plans(model: CostModel, plans: Sequence[Plan]) -> list[list[Terms]]:
    """Seconds of every stage of some plans by term.

    Args:
        model: The cost model, which keeps them.
        plans: The plans, of the model's network and for its devices.
    """
    if isinstance(model, MixedCostModel):
        return [_terms(seconds_of_stages(model, placed_slots_of(plan, model.cluster))) for plan in plans]
    each = [list(_questions(model, plan)) for plan in plans]
    own = iter(model.own_terms.of_all([item for found in each for item, _ in found], partial(_own_terms, model)))
    shared = iter(model.shared_terms.of_all([item for found in each for _, item in found], partial(_shared, model)))
    return [[{**next(own), **next(shared)} for _ in found] for found in each]


def seconds_of_terms(terms: Sequence[Terms]) -> StageSeconds:
    """Seconds of stages by term, stage after stage in the arrays."""
    rows = zip(*(item.values() for item in terms), strict=True)
    return StageSeconds(**{name: np.array(values) for name, values in zip(_NAMES, rows, strict=True)})


def _terms(found: Sequence[StageSeconds]) -> list[Terms]:
    return [{term: float(getattr(item, name)[0]) for term, name in zip(_TERMS, _NAMES, strict=True)} for item in found]


def _questions(model: StageCostModel, plan: Plan) -> Iterator[tuple[_Own, _Seam]]:
    """What has to be known of every stage of a plan."""
    placements, several = placements_of(plan, model.cluster), plan.num_stages > 1
    has_world = plan.world_size > 1
    has_deferred = model.profile.overheads.deferred_operator_seconds > 0
    for index, (stage, placement) in enumerate(zip(plan.stages, placements, strict=True)):
        shape, unshards = _shape(stage, several), stage.zero_stage >= ZeroStage.PARAMETERS
        # Unsharding depends on when which microbatch is run, and splitting backwards may take operators of its own.
        is_other = unshards or (has_deferred and plan.schedule == "zb-h1")
        place = _Place(
            shape=shape,
            shard_nodes=placement.shard_nodes,
            ring_nodes=placement.ring_nodes,
            microbatches=plan.num_microbatches if unshards else min(2, plan.num_microbatches),
            behind=plan.num_stages - 1 - index if unshards else 0,
            has_world=has_world,
            schedule=plan.schedule if is_other else "1f1b",
        )
        start, end = stage.layers
        what = _Stage(
            start=start,
            end=end,
            checkpointed=stage.checkpointing.layers,
            zero_stage=int(stage.zero_stage),
            offload=stage.offload if stage.offload.any else None,
        )
        yield _Own(place, what), _Seam(shape, placement, start, end)


def _shape(stage: StagePlan, several: bool) -> _Shape:
    mesh = stage.mesh
    return _Shape(
        rows=stage.microbatch_size,
        data=mesh.data_parallel_degree,
        tensor=mesh.tensor_parallel_degree,
        sequence=mesh.sequence_parallel,
        context=mesh.context_parallel_degree,
        has_others=several,
    )


def _own_terms(model: StageCostModel, questions: Sequence[_Own]) -> list[Terms]:
    """What stages take by themselves; what they exchange with others is not meant."""
    groups: dict[tuple[_Place, bool], list[int]] = defaultdict(list)
    for index, item in enumerate(questions):
        groups[item.place, item.stage.offload is None].append(index)
    asked = [(place.slot, _candidates([questions[index].stage for index in at])) for (place, _), at in groups.items()]
    found: dict[int, Terms] = {}
    for members, seconds in zip(groups.values(), model.seconds_of(asked), strict=True):
        rows = zip(*(getattr(seconds, name).tolist() for name in _NAMES), strict=True)
        found.update((index, dict(zip(_TERMS, row, strict=True))) for index, row in zip(members, rows, strict=True))
    return [found[index] for index in range(len(questions))]


def _candidates(stages: Sequence[_Stage]) -> StageCandidates:
    """Stages of which all or none move something."""
    moved = [item.offload for item in stages if item.offload is not None]
    return StageCandidates(
        start_K=np.array([item.start for item in stages]),
        end_K=np.array([item.end for item in stages]),
        checkpointed_K=np.array([item.checkpointed for item in stages]),
        zero_stage_K=np.array([item.zero_stage for item in stages]),
        offload=OffloadCandidates(
            parameters_K=np.array([item.parameters for item in moved]),
            gradients_K=np.array([item.gradients for item in moved]),
            optimizer_K=np.array([item.optimizer for item in moved]),
            activations_K=np.array([item.activations for item in moved]),
        )
        if moved
        else None,
    )


def _shared(model: StageCostModel, questions: Sequence[_Seam]) -> list[Terms]:
    """What stages exchange with others."""
    groups: dict[tuple[_Shape, Placement], list[int]] = defaultdict(list)
    for index, item in enumerate(questions):
        groups[item.shape, item.placement].append(index)
    found: dict[int, Terms] = {}
    for (shape, placement), members in groups.items():
        none_K = np.zeros(len(members), dtype=np.int64)
        candidates = StageCandidates(
            start_K=np.array([questions[index].start for index in members]),
            end_K=np.array([questions[index].end for index in members]),
            checkpointed_K=none_K,
            zero_stage_K=none_K,
        )
        values = model.exchanged(shape.slot(placement), candidates)
        for index, row in zip(members, zip(*(item.tolist() for item in values), strict=True), strict=True):
            found[index] = dict(zip(SHARED, row, strict=True))
    return [found[index] for index in range(len(questions))]
