"""The pipelines of a search space, what their stages may be on every part of the devices, and lower bounds of both.

A pipeline names, beside its numbers of stages and microbatches, the order in which its stages pass the parts of the
cluster, of which there is one if devices are alike. The stages of one part are neighbours, so that a batch crosses from
each part to the next once; parts follow each other in every order. A stage takes devices of one part only, and pays for
what it exchanges with a stage of another at the slower end's rate: of what it may be there are as many versions as ways
for the stages next to it to lie elsewhere. How many of the stages lie in which part is chosen with the rest. The only
stage of a plan has all devices of all parts.

What searches have proven of pipelines holds in later ones with as much memory or less (:class:`ProvenBounds`): less
memory never makes a plan faster, as whatever fits in it fits in more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

import numpy as np

from lightning_mist.cost import CostModel
from lightning_mist.cost.inputs import BoolArray
from lightning_mist.hardware import AnyCluster, Cluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan
from lightning_mist.plan.grid import rank_layout
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
from lightning_mist.tuner.space import (
    Space,
    apply,
    divisors,
    host_bytes_of_each,
    least_of_stages,
    places_behind,
    stages_dealt,
    usable_of_parts,
)


class Stages:
    """What the stages of plans may be; keeps what several pipelines share.

    Args:
        memory_limit: Bytes of each device that may be used in all.
        host_memory_limit: Bytes of host memory of each node that offloading may take.
        more: Bytes that tensors may take on each device beyond its limit.
        like: Those of the same space with other memory, if they are known: what does not depend on it is shared.

    Attributes:
        spaces: That of every part, whose stages have devices of it only.
        parts: What stages on the devices of every part may be.
        together: What the only stage of a plan may be.
    """

    parts: tuple[IntraStage, ...]
    together: IntraStage

    def __init__(
        self,
        model: CostModel,
        space: Space,
        memory_limit: int | None = None,
        host_memory_limit: int | None = None,
        more: float = 0.0,
        like: "Stages | None" = None,
    ) -> None:
        self.model, self.space, parts = model, space, model.cluster.parts
        is_alike = len(parts) == 1
        self.spaces = (space,) if is_alike else tuple(space_of(part, space, model.spec) for part in parts)
        limits = usable_of_parts(model.cluster, memory_limit)
        known = (None,) * len(parts) if like is None else like.parts
        self.parts = tuple(
            IntraStage(
                own,
                item,
                limit + more,
                host_limit=host_bytes_of_each(part, host_memory_limit),
                elsewhere=tuple(other for other in self.spaces if other is not item),
                like=other,
            )
            for own, part, item, limit, other in zip(model.parts, parts, self.spaces, limits, known, strict=True)
        )
        self.together = self.parts[0]
        if not is_alike:
            only = replace(space, search=replace(space.search, devices_per_stage=(space.world_size,)))
            host_limit = min(part.host_limit for part in self.parts)
            alone = None if like is None else like.together
            self.together = IntraStage(model, only, self.memory_limit, host_limit=host_limit, like=alone)
        self.bounds = PipelineBounds(
            parts=[
                PartBounds(
                    model=own,
                    space=part.space,
                    slot_of=part.slot,
                    memory_limit=part.memory_limit,
                    part=number,
                    num_parts=len(parts),
                )
                for number, (own, part) in enumerate(zip(model.parts, self.parts, strict=True))
            ],
            num_layers=space.num_layers,
            num_devices=self.sizes,
        )
        if like is not None:
            for one, before in zip(self.bounds.parts, like.bounds.parts, strict=True):
                one.share(before)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of every part."""
        return tuple(part.world_size for part in self.model.cluster.parts)

    @property
    def memory_limit(self) -> float:
        """Bytes that every device may use: those of the part where it is least."""
        return min(part.memory_limit for part in self.parts)

    @property
    def evaluated(self) -> int:
        """Candidates whose seconds were computed."""
        return sum(item.evaluated for item in {*self.parts, self.together})

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that the devices of every stage of a plan may use."""
        return least_of_stages(plan, self.model.cluster, [part.memory_limit for part in self.parts])

    def host_limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes of host memory that each device of every stage of a plan may use."""
        return least_of_stages(plan, self.model.cluster, [part.host_limit for part in self.parts])

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
        numbers = {key: key[:2] for key in self.pipelines}
        bounds = quick_bounds(self.parts, self.together, self.sizes, sorted(set(numbers.values())))
        return {key: bounds[item] for key, item in numbers.items()}

    def lower_bound(self, group: PipelineGroup, below: float, deadline: float) -> float:
        """Step seconds that no plan of a group that fits goes below, as far as they are less than ``below``."""
        return self.bounds.bound(group, below, deadline, self._kinds(resident=False))

    def _kinds(self, *, resident: bool) -> frozenset[str]:
        """Kinds of state that may be offloaded."""
        return frozenset(self.space.search.offloaded if self.space.offload_ratios and not resident else ())

    def single(self, num_microbatches: int, *, below: float, resident: bool, deadline: float) -> InterStageProblem:
        """The choices of the only stage, without those that take at least ``below`` seconds; as of :meth:`family`."""
        wish, slowest = (0, 1, (), None), below / num_microbatches
        (found,) = self.together.frontiers([wish], num_microbatches, slowest, resident=resident, deadline=deadline)
        return InterStageProblem(
            num_layers=self.space.num_layers,
            num_devices=self.sizes,
            num_microbatches=num_microbatches,
            slots=(found if len(self.parts) == 1 else found.placed(EVERY_PART, 0),),
        )

    def family(
        self,
        group: PipelineGroup,
        counts: Sequence[int],
        *,
        below: float,
        resident: bool = False,
        deadline: float = np.inf,
    ) -> Family:
        """The choices of all stages, without those that only plans of at least ``below`` seconds can have.

        Args:
            counts: Their numbers of stages, of the group's.
            below: Seconds; a pipeline takes at least ``G`` times the steady time of any of its stages.
            resident: Whether all state stays on the device.
            deadline: Value of ``thread_time()`` from which on nothing more is evaluated.

        Raises:
            TimeIsUpError: If it comes before all choices are known.
        """
        found, count = None, group.num_microbatches
        if below < np.inf:
            found = self.bounds.open_stages(group, counts, below, self._kinds(resident=resident))
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
            slowest = np.inf if found is None else found.slowest
            slots = own.frontiers(wishes, count, slowest, resident=resident, deadline=deadline)
            # Those that alike stages share stay the same object.
            choices |= {
                place: slot.placed(part, place.seams) if part or place.seams else slot
                for place, slot in zip(here, slots, strict=True)
            }

        def choices_of(stage_index: int, num_stages: int) -> SlotChoices:
            some = [choices[place] for place in places[stage_index, num_stages] if place in choices]
            return some[0] if len(some) == 1 else SlotChoices.joined([SlotChoices.none(), *some])

        return Family.of(self.space.num_layers, self.sizes, count, counts, choices_of, group.parts)


def _groups(space: Space, spaces: Sequence[Space], only: Space, parts: Sequence[Cluster]) -> Iterator[PipelineGroup]:
    """Every pipeline: those of one stage, then those to whose stages the parts can be dealt out, in every order."""
    if space.search.devices_per_stage is None or space.world_size in space.search.devices_per_stage:
        single = [count for stages, count in only.pipelines() if stages == 1]
        yield from (PipelineGroup(num_microbatches=count, parts=(), counts=(1,)) for count in single)
    asked = space.stage_counts
    for num_microbatches in sorted({count for item in spaces for count in item.microbatch_counts()}):
        sizes = [{shape.devices for shape in item.shapes(num_microbatches)} for item in spaces]
        together = {0}
        for own, part in zip(sizes, parts, strict=True):
            dealt = stages_dealt(own, part.world_size, space.max_stages)
            together = {count + more for count in together for more in dealt}
        counts = tuple(count for count in asked if count in together and count > 1)
        counts = tuple(count for count in counts if all(item.shapes_of(count, num_microbatches) for item in spaces))
        # Equal stages have other layers with every number of stages.
        for some in [(count,) for count in counts] if space.search.equal_stages else [counts]:
            for order in permutations(range(len(parts))) if some else ():
                yield PipelineGroup(num_microbatches=num_microbatches, parts=order, counts=some)


def space_of(part: Cluster, space: Space, spec: ModelSpec) -> Space:
    """The search space of a part: its stages have some of its devices, of which those of a node may share layers."""
    asked = space.search.devices_per_stage
    counts = divisors(part.world_size) if asked is None else tuple(n for n in asked if n <= part.world_size)
    # A number that no stage of the part can have leaves it without any.
    search = replace(space.search, devices_per_stage=counts or (space.world_size,))
    rows, near = space.global_batch_size, part.devices_per_node
    return apply(search, spec, space.world_size, rows, devices_per_node=near)


def layout_of(
    cluster: AnyCluster, degrees: Sequence[tuple[int, int]], parts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Global ranks of every stage; see :func:`~lightning_mist.plan.grid.rank_layout`, by part.

    Args:
        degrees: Data- and tensor-parallel degree of every stage.
        parts: The part in which each of them lies, or that the only one lies in all.
    """
    if list(parts) == [EVERY_PART] or len(cluster.parts) == 1:
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
    return tuple(limit for part in stages.parts for limit in (part.memory_limit, part.host_limit))
