"""What the search asks of the pipelines of a search space, and the answers on devices that are alike or unlike.

On unlike devices a pipeline names, beside its numbers of stages and microbatches, the order in which its stages pass
the parts of the cluster. The stages of one part are neighbours, so that a batch crosses from each part to the next
once; parts follow each other in every order. A stage takes devices of one part only, and pays for what it exchanges
with a stage of another at the slower end's rate: of what it may be there are as many versions as ways for the stages
next to it to lie elsewhere. How many of the stages lie in which part is chosen with the rest. The only stage of a plan
has all devices of all parts.

What searches have proven of pipelines holds in later ones with as much memory or less (:class:`ProvenBounds`): less
memory never makes a plan faster, as whatever fits in it fits in more.

Array axes
    N  arrangements of devices
    R  regions
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import permutations
from typing import Protocol, TypeAlias

import numpy as np

from lightning_mist.cost import MixedCostModel, StageCostModel
from lightning_mist.cost.inputs import BoolArray, FloatArray
from lightning_mist.cost.time import RegionSeconds
from lightning_mist.hardware import Cluster, MixedCluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan
from lightning_mist.plan.rank_order import rank_layout
from lightning_mist.tuner.bounds import PartBounds, PipelineBounds, quick_bounds
from lightning_mist.tuner.candidates import EVERY_PART, IntraStage, SlotChoices
from lightning_mist.tuner.inter_stage import (
    Family,
    InterStageProblem,
    Pipeline,
    PipelineGroup,
    StagePlace,
    heads_of,
    tails_of,
)
from lightning_mist.tuner.space import Space, apply, at_most, divisors, host_bytes_of_each, places_behind, usable_bytes


class Pipelines(Protocol):
    """The pipelines of a search space."""

    space: Space

    @property
    def groups(self) -> tuple[PipelineGroup, ...]:
        """Every pipeline, those together that are solved together."""

    def quick_bounds(self) -> dict[Pipeline, float]:
        """Step seconds that no plan of each pipeline goes below, whatever memory it needs."""

    def lower_bound(self, group: PipelineGroup, below: float, deadline: float) -> float:
        """Step seconds that no plan of a group that fits goes below, as far as they are less than ``below``."""

    def try_ratios(self, ratios: Sequence[float], deadline: float = np.inf) -> None:
        """Let stages offload these fractions of each kind of state, until ``deadline``."""

    def single(self, num_microbatches: int, *, below: float) -> InterStageProblem:
        """The choices of the only stage, without those that take at least ``below`` seconds."""

    def family(self, group: PipelineGroup, counts: Sequence[int], *, below: float) -> Family:
        """The choices of all stages, without those that only plans of at least ``below`` seconds can have."""


class AlikePipelines:
    """The pipelines of a search space on devices that are all alike."""

    def __init__(self, intra: IntraStage) -> None:
        assert isinstance(intra.model, StageCostModel)
        self.intra, self.space = intra, intra.space
        own = PartBounds(model=intra.model, space=intra.space, slot_of=intra.slot, memory_limit=intra.memory_limit)
        sizes = intra.space.num_layers, (intra.space.world_size,)
        self.bounds = PipelineBounds(parts=(own,), num_layers=sizes[0], num_devices=sizes[1])
        self.try_ratios(intra.space.offload_ratios)

    @cached_property
    def groups(self) -> tuple[PipelineGroup, ...]:
        """Every pipeline, those together whose stages cost the same but for how many are behind them."""
        counts: dict[tuple[int, int], list[int]] = {}
        for num_stages, num_microbatches in self.space.pipelines():
            # One stage has nothing to send, and equal stages have other layers with every number of stages.
            kind = num_stages if self.space.search.equal_stages else min(num_stages, 2)
            counts.setdefault((kind, num_microbatches), []).append(num_stages)
        return tuple(
            PipelineGroup(num_microbatches, (), tuple(sorted(stages)))
            for (_, num_microbatches), stages in sorted(counts.items())
        )

    def quick_bounds(self) -> dict[Pipeline, float]:
        """Step seconds that no plan of each pipeline goes below, whatever memory it needs."""
        return {Pipeline(*key, ()): bound for key, bound in quick_bounds(self.intra, self.space).items()}

    def lower_bound(self, group: PipelineGroup, below: float, deadline: float) -> float:
        """Step seconds that no plan of a group that fits goes below, as far as they are less than ``below``."""
        return self.bounds.bound(group, below, deadline)

    def try_ratios(self, ratios: Sequence[float], deadline: float = np.inf) -> None:
        """Let stages, and bounds, offload these fractions of each kind of state, until ``deadline``."""
        self.intra.try_ratios(ratios, deadline)
        self.bounds.let_offload(frozenset(self.space.search.offloaded if ratios else ()))

    def single(self, num_microbatches: int, *, below: float) -> InterStageProblem:
        """The choices of the only stage, without those that take at least ``below`` seconds."""
        return InterStageProblem(
            num_layers=self.space.num_layers,
            num_devices=(self.space.world_size,),
            num_microbatches=num_microbatches,
            slots=(self.intra.frontier(0, 1, num_microbatches, below / num_microbatches),),
        )

    def family(self, group: PipelineGroup, counts: Sequence[int], *, below: float) -> Family:
        """The choices of all stages, without those that only plans of at least ``below`` seconds can have."""
        num_microbatches = group.num_microbatches
        sizes = self.space.num_layers, (self.space.world_size,)
        if below == np.inf:
            frontier = partial(self.intra.frontier, num_microbatches=num_microbatches)
            return Family.of(*sizes, num_microbatches, counts, frontier)
        found = self.bounds.open_stages(group, counts, below)
        places = [*places_behind(found.counts), *((0, count) for count in found.counts)]
        asked = [(*place, (), found.of(*place)) for place in places]
        slots = self.intra.frontiers(asked, num_microbatches, found.slowest)
        choices = dict(zip(places, slots, strict=True))
        return Family.of(*sizes, num_microbatches, found.counts, lambda *place: choices[place])


class MixedStages:
    """What the stages of plans on unlike devices may be; keeps what several pipelines share.

    Args:
        spaces: That of every part, whose stages have devices of it only.
        limits: Bytes that a device of every part may use.
        host_limits: Bytes of host memory that it may use for what it offloads.
        like: Others that differ in these bytes alone: what does not depend on them is shared.
    """

    parts: tuple[IntraStage, ...]
    together: IntraStage
    bounds: PipelineBounds

    def __init__(
        self,
        model: MixedCostModel,
        space: Space,
        spaces: Sequence[Space],
        limits: Sequence[float],
        host_limits: Sequence[float],
        like: "MixedStages | None" = None,
    ) -> None:
        self.model, self.space, self.part_limits = model, space, tuple(limits)
        self.spaces = tuple(spaces)
        known = (None,) * len(spaces) if like is None else like.parts
        self.parts = tuple(
            IntraStage(
                own,
                part,
                limit,
                host_limit=host,
                elsewhere=tuple(item for item in spaces if item is not part),
                like=other,
            )
            for own, part, limit, host, other in zip(model.parts, spaces, limits, host_limits, known, strict=True)
        )
        only = replace(space, search=replace(space.search, devices_per_stage=(space.world_size,)))
        alone = None if like is None else like.together
        self.together = IntraStage(model, only, min(limits), host_limit=min(host_limits), like=alone)
        self.bounds = PipelineBounds(
            parts=[
                PartBounds(
                    model=own,
                    space=part.space,
                    slot_of=part.slot,
                    memory_limit=part.memory_limit,
                    part=number,
                    num_parts=len(self.parts),
                )
                for number, (own, part) in enumerate(zip(model.parts, self.parts, strict=True))
            ],
            num_layers=space.num_layers,
            num_devices=self.sizes,
        )
        if like is not None:
            for one, other in zip(self.bounds.parts, like.bounds.parts, strict=True):
                one.share(other)
        self.try_ratios(space.offload_ratios)

    @property
    def memory_limit(self) -> float:
        """Bytes that every device may use: those of the part where it is least."""
        return min(self.part_limits)

    @property
    def evaluated(self) -> int:
        """Candidates whose seconds were computed."""
        return sum(item.evaluated for item in (*self.parts, self.together))

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that the devices of every stage of a plan may use."""
        return self._in_parts(plan, self.part_limits)

    def host_limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes of host memory that each device of every stage of a plan may use."""
        return self._in_parts(plan, tuple(part.host_limit for part in self.parts))

    def _in_parts(self, plan: Plan, of_parts: tuple[float, ...]) -> tuple[float, ...]:
        """The least of the parts' limits for the devices of every stage."""
        cluster = self.model.cluster
        return tuple(
            min(of_parts[part] for part in {cluster.part_of(device) for device in stage.devices})
            for stage in plan.stages
        )

    @cached_property
    def groups(self) -> tuple[PipelineGroup, ...]:
        """Every pipeline of the search space, those together that differ only in their number of stages."""
        return tuple(_groups(self.space, self.spaces, self.together.space, self.model.cluster.parts))

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Every pipeline of the search space."""
        return tuple(group.pipeline(count) for group in self.groups for count in group.counts)

    def quick_bounds(self) -> dict[Pipeline, float]:
        """Step seconds that no plan of each pipeline goes below, whatever memory it needs."""
        # Of several stages it does not matter how many.
        numbers = {key: (min(key.num_stages, 2), key.num_microbatches) for key in self.pipelines}
        bounds = {item: self.bound(*item) for item in set(numbers.values())}
        return {key: bounds[item] for key, item in numbers.items()}

    def lower_bound(self, group: PipelineGroup, below: float, deadline: float) -> float:
        """Step seconds that no plan of a group that fits goes below, as far as they are less than ``below``."""
        return self.bounds.bound(group, below, deadline)

    def try_ratios(self, ratios: Sequence[float], deadline: float = np.inf) -> None:
        """Let stages, and bounds, offload these fractions of each kind of state, until ``deadline``."""
        for item in (*self.parts, self.together):
            item.try_ratios(ratios if item.space.offload_ratios else (), deadline)
        self.bounds.let_offload(frozenset(self.space.search.offloaded if ratios else ()))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of every part."""
        return tuple(part.world_size for part in self.model.cluster.parts)

    def single(self, num_microbatches: int, *, below: float) -> InterStageProblem:
        """The choices of the only stage, without those that take at least ``below`` seconds."""
        found = self.together.frontier(0, 1, num_microbatches, below / num_microbatches)
        return InterStageProblem(
            num_layers=self.space.num_layers,
            num_devices=self.sizes,
            num_microbatches=num_microbatches,
            slots=(_in_part(found, EVERY_PART),),
        )

    def family(self, group: PipelineGroup, counts: Sequence[int], *, below: float) -> Family:
        """The choices of all stages, without those that only plans of at least ``below`` seconds can have.

        Args:
            counts: Their numbers of stages, of the group's.
            below: Seconds; a pipeline takes at least ``G`` times the steady time of any of its stages.
        """
        found, count = None, group.num_microbatches
        if below < np.inf:
            found = self.bounds.open_stages(group, counts, below)
            counts = found.counts
        places = {
            **{(0, stages): [*heads_of(group.parts, stages)] for stages in counts},
            **{place: [*tails_of(group.parts, place[1] - 1 - place[0], counts)] for place in places_behind(counts)},
        }
        asked: dict[StagePlace, BoolArray | None] = dict.fromkeys(place for some in places.values() for place in some)
        if found is not None:
            open_stages = {place: found.of(*place[:2], place.part, place.seams) for place in asked}
            asked = {place: among_NL for place, among_NL in open_stages.items() if among_NL.any()}
        choices: dict[StagePlace, SlotChoices] = {}
        for part, own in enumerate(self.parts):
            here = [place for place in asked if place.part == part]
            wishes = [(*place[:2], place.pipeline, asked[place]) for place in here]
            slots = own.frontiers(wishes, count, np.inf if found is None else found.slowest)
            choices |= {place: _in_part(slot, part, place.seams) for place, slot in zip(here, slots, strict=True)}

        def choices_of(stage_index: int, num_stages: int) -> SlotChoices:
            some = [choices[place] for place in places[stage_index, num_stages] if place in choices]
            return SlotChoices.joined([SlotChoices.none(), *some])

        return Family.of(self.space.num_layers, self.sizes, count, counts, choices_of, group.parts)

    def bound(self, num_stages: int, num_microbatches: int) -> float:
        """Step seconds that no pipeline goes below, whatever memory it needs and wherever its stages lie.

        If ``r_p`` are seconds times devices that a region takes at least in part ``p``, then with any weights
        ``w_p >= 0`` of which ``sum_p N_p w_p = 1`` no stage can take less than ``sum_R min_p w_p r_p`` on average, and
        the slowest takes at least that (linear programming duality). A single stage takes as long as on any device.
        """
        if num_stages == 1:
            space = self.together.space
            alone = (self._least(own.region_seconds, space, num_microbatches)[0] for own in self.model.parts)
            return num_microbatches * max(float(least_R.sum()) for least_R in alone)
        each = [
            self._least(own.region_seconds, space, num_microbatches)
            for own, space in zip(self.model.parts, self.spaces, strict=True)
        ]
        least_PR, work_PR = np.stack([item[0] for item in each]), np.stack([item[1] for item in each])
        alone_P = work_PR.sum(axis=1)
        speed_P = alone_P[0] / alone_P
        weight_P = speed_P / float((np.array(self.sizes) * speed_P).sum())
        slowest = float((weight_P[:, None] * work_PR).min(axis=0).sum())
        total = float(least_PR.min(axis=0).sum())
        return (num_microbatches - 1) * slowest + max(total, slowest)

    @staticmethod
    def _least(
        seconds: Callable[[float, int, bool], RegionSeconds], space: Space, num_microbatches: int
    ) -> tuple[FloatArray, FloatArray]:
        """Of every region, the least seconds and seconds times devices of any arrangement."""
        shapes = space.shapes(num_microbatches)
        found = [seconds(space.rows(num_microbatches, shape.data), shape.tensor, shape.sequence) for shape in shapes]
        region_NR = np.stack([item.forward_R + item.backward_R for item in found])
        devices_N1 = np.array([shape.devices for shape in shapes])[:, None]
        return region_NR.min(axis=0), (region_NR * devices_N1).min(axis=0)


def _in_part(choices: SlotChoices, part: int, seams: int = 0) -> SlotChoices:
    return replace(choices, part_K=np.full(len(choices), part), seams_K=np.full(len(choices), seams))


def _groups(space: Space, spaces: Sequence[Space], only: Space, parts: Sequence[Cluster]) -> Iterator[PipelineGroup]:
    """Every pipeline: those of one stage, then those to whose stages the parts can be dealt out, in every order."""
    if space.search.devices_per_stage is None or space.world_size in space.search.devices_per_stage:
        single = [count for stages, count in only.pipelines() if stages == 1]
        yield from (PipelineGroup(num_microbatches=count, parts=(), counts=(1,)) for count in single)
    asked = space.stage_counts
    for num_microbatches in sorted({count for item in spaces for count in item.microbatch_counts()}):
        sizes = [{shape.devices for shape in item.shapes(num_microbatches)} for item in spaces]
        reached = [
            _stages_of_part(counts, part.world_size, space.max_stages)
            for counts, part in zip(sizes, parts, strict=True)
        ]
        together = {0}
        for own in reached:
            together = {count + more for count in together for more in own}
        counts = tuple(sorted(together.intersection(asked)))
        # Equal stages have other layers with every number of stages.
        for some in [(count,) for count in counts] if space.search.equal_stages else [counts]:
            for order in permutations(range(len(parts))) if some else ():
                yield PipelineGroup(num_microbatches=num_microbatches, parts=order, counts=some)


def _stages_of_part(counts: Collection[int], size: int, most: int) -> tuple[int, ...]:
    """Numbers of stages to which all devices of a part can be dealt, if a stage has one of these numbers of them."""
    sums, found = {0}, []
    for stages in range(1, most + 1):
        sums = {total + count for total in sums for count in counts if total + count <= size}
        if size in sums:
            found.append(stages)
    return tuple(found)


Stages: TypeAlias = IntraStage | MixedStages
"""What the stages of plans may be, on equal or unlike devices."""


def mixed_stages(
    model: MixedCostModel,
    space: Space,
    memory_limit: int | None,
    host_memory_limit: int | None,
    more: float = 0.0,
    like: MixedStages | None = None,
) -> MixedStages:
    """What the stages of plans on unlike devices may be.

    Args:
        memory_limit: Bytes of each device that may be used in all, at most its memory.
        host_memory_limit: Bytes of host memory of each node that offloading may take.
        more: Bytes that tensors may take on each device beyond its limit.
        like: Those of the same space with other memory, if they are known.
    """
    parts = model.cluster.parts
    return MixedStages(
        model,
        space,
        [space_of(part, space, model.spec) for part in parts],
        [usable_bytes(part, at_most(part, memory_limit)) + more for part in parts],
        [host_bytes_of_each(part, host_memory_limit) for part in parts],
        like,
    )


def space_of(part: Cluster, space: Space, spec: ModelSpec) -> Space:
    """The search space of a part: its stages have some of its devices, of which those of a node may share layers."""
    asked = space.search.devices_per_stage
    counts = divisors(part.world_size) if asked is None else tuple(n for n in asked if n <= part.world_size)
    # A number that no stage of the part can have leaves it without any.
    search = replace(space.search, devices_per_stage=counts or (space.world_size,))
    rows, near = space.global_batch_size, part.devices_per_node
    return apply(search, spec, space.world_size, rows, devices_per_node=near)


def mixed_layout(
    cluster: MixedCluster, degrees: Sequence[tuple[int, int]], parts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Global ranks of every stage; see :func:`~lightning_mist.plan.rank_order.rank_layout`, by part.

    Args:
        degrees: Data- and tensor-parallel degree of every stage.
        parts: The part in which each of them lies, or that the only one lies in all.
    """
    if list(parts) == [EVERY_PART]:
        return rank_layout(degrees, cluster.devices_per_node)
    ranks: dict[int, tuple[int, ...]] = {}
    for number, (part, first) in enumerate(zip(cluster.parts, cluster.offsets, strict=True)):
        own = [stage for stage, where in enumerate(parts) if where == number]
        layout = rank_layout([degrees[stage] for stage in own], part.devices_per_node)
        ranks |= {stage: tuple(first + rank for rank in found) for stage, found in zip(own, layout, strict=True)}
    return tuple(ranks[stage] for stage in range(len(parts)))


@dataclass(frozen=True, slots=True)
class ProvenBounds:
    """Step seconds that no plan of pipelines goes below, by their space and the memory that there was."""

    _found: dict[Space, list[tuple[tuple[float, ...], Mapping[Pipeline, float]]]] = field(default_factory=dict)

    def of(self, stages: Stages) -> dict[Pipeline, float]:
        """What is proven of pipelines of these stages."""
        known: dict[Pipeline, float] = {}
        own = _limits(stages)
        for limits, bounds in self._found.get(stages.space, ()):
            if all(mine <= other for mine, other in zip(own, limits, strict=True)):
                known |= {key: max(bound, known.get(key, 0.0)) for key, bound in bounds.items()}
        return known

    def add(self, stages: Stages, bounds: Mapping[Pipeline, float]) -> None:
        """Remember what was proven of pipelines of these stages."""
        self._found.setdefault(stages.space, []).append((_limits(stages), bounds))


def _limits(stages: Stages) -> tuple[float, ...]:
    """Bytes that devices of every part may use, and of host memory."""
    parts = stages.parts if isinstance(stages, MixedStages) else (stages,)
    return tuple(limit for part in parts for limit in (part.memory_limit, part.host_limit))
