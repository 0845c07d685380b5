"""Lower bounds of pipelines by those of their stages, and variable fixing: which layers and devices a stage can have.

Lower bounds of stages (:mod:`lightning_mist.tuner.bounds.stage_bounds`) are choices that take no longer than any that
there are, so that the dynamic program over them (:mod:`lightning_mist.tuner.inter_stage.exact_solver`) bounds the step
seconds of all pipelines of a family. Most families are ruled out by that before any of their stages is evaluated. Of
the others every pair of layers and devices is left out that no pipeline can have that is fast enough, and so is what is
too slow: with ``Z`` the least sum of the steady times of all stages, a pipeline of fewer than ``V`` seconds has

    (G - 1) max_i t_i + Z < V.

Array axes
    N  numbers of devices, from 0 to all
    L  numbers of layers, from 0 to all
    R  regions
    K  choices of stages at states
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.bounds.stage_bounds import PartBounds
from lightning_mist.tuner.candidates import ANY_SEAMS, ROOM, IntraStage, SlotChoices
from lightning_mist.tuner.inter_stage import Family, PipelineGroup, Suffixes, SuffixWalk, matching, solve_family
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.space import Space


def quick_bounds(
    parts: Sequence[IntraStage], together: IntraStage, sizes: Sequence[int], pipelines: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Step seconds that no plan of a pipeline goes below, whatever memory it needs and wherever its stages lie.

    If ``r_p`` are seconds times devices that a region takes at least in part ``p``, then with any weights ``w_p >= 0``
    of which ``sum_p N_p w_p = 1`` no stage can take less than ``sum_R min_p w_p r_p`` on average, and the slowest takes
    at least that (linear programming duality). Every stage has a layer: with ``r`` the least seconds times devices that
    any layer takes anywhere, stages of ``n_i`` devices take at least ``sum_i r / n_i >= r S^2 / N`` together. A single
    stage takes as long as on any of its devices.

    Args:
        parts: What stages in every part may be.
        together: What a single stage may be.
        sizes: Devices of every part.
        pipelines: Numbers of stages and of microbatches.
    """
    world, num_layers = sum(sizes), together.space.num_layers
    known: dict[tuple[int, Space, int], tuple[IntArray, FloatArray]] = {}
    result = {}
    for num_stages, count in pipelines:
        most, least_by_part_R, work_by_part_R = world - num_stages + 1, [], []
        for number, part in enumerate(parts):
            space = together.space if num_stages == 1 else part.space
            if (number, space, count) not in known:
                known[number, space, count] = _region_seconds(part, space, count)
            devices_N, region_NR = known[number, space, count]
            inside_N = devices_N == world if num_stages == 1 else devices_N <= most
            least_by_part_R.append(region_NR[inside_N].min(axis=0))
            work_by_part_R.append((region_NR * devices_N[:, None])[inside_N].min(axis=0))
        if num_stages == 1:
            result[num_stages, count] = count * max(float(least_R.sum()) for least_R in least_by_part_R)
            continue
        alone = np.array([work_R.sum() for work_R in work_by_part_R])
        speeds = np.divide(alone[0], alone, out=np.ones(len(parts)), where=alone > 0)
        slowest = float((work_by_part_R * speeds[:, None]).min(axis=0).sum()) / float((sizes * speeds).sum())
        total = float(np.min(least_by_part_R, axis=0).sum())
        layer = min(float(work_R[1 : num_layers + 1].min(initial=np.inf)) for work_R in work_by_part_R)
        each = layer * num_stages**2 / world if num_layers else 0.0
        result[num_stages, count] = (count - 1) * slowest + max(total, slowest, each)
    return result


def _region_seconds(intra: IntraStage, space: Space, num_microbatches: int) -> tuple[IntArray, FloatArray]:
    """The devices of every arrangement, and what every region takes on them."""
    shapes = space.shapes(num_microbatches)
    seconds = [
        intra.model.region_seconds(space.rows(num_microbatches, shape.data), shape.tensor, shape.sequence)
        for shape in shapes
    ]
    return np.array([shape.devices for shape in shapes]), np.stack([s.forward_R + s.backward_R for s in seconds])


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStages:
    """What stages of a family can have after variable fixing.

    Attributes:
        counts: The numbers of stages, ascending, with which a pipeline may be fast enough.
        slowest: Steady seconds that no stage exceeds.
        heads_NL: Devices and layers of first stages, by the numbers of stages.
        tails_NL: The same of other stages, by how many are behind them, and by where they lie: in which part, next to
            which others.
    """

    counts: tuple[int, ...]
    slowest: float
    heads_NL: BoolArray
    tails_NL: BoolArray

    def of(self, stage_index: int, num_stages: int, part: int = 0, seams: int = 0) -> BoolArray:
        """Devices and layers of one stage; none if no pipeline that has it is fast enough.

        Args:
            part: The part in which it lies.
            seams: Which of the stages next to it lie in others, as of choices.
        """
        behind, none_NL = num_stages - 1 - stage_index, np.zeros(self.tails_NL.shape[2:], dtype=bool)
        if stage_index:
            return self.tails_NL[behind, part * ANY_SEAMS + seams] if behind < len(self.tails_NL) else none_NL
        return self.heads_NL[self.counts.index(num_stages)] if num_stages in self.counts else none_NL


@dataclass(slots=True, kw_only=True)
class PipelineBounds:
    """Lower bounds of pipelines; keeps what it has found.

    Attributes:
        parts: Those of the stages in every part of the cluster.
        num_devices: Devices of every part.
    """

    parts: Sequence[PartBounds]
    num_layers: int
    num_devices: tuple[int, ...]
    _found: dict[tuple[frozenset[str], PipelineGroup], tuple[float, float]] = field(default_factory=dict)

    def bound(self, group: PipelineGroup, below: float, deadline: float, kinds: frozenset[str]) -> float:
        """Step seconds that no pipeline of a group goes below, as far as they are less than ``below``.

        Args:
            below: Seconds from which on it does not matter; finite.
            deadline: Value of ``thread_time()`` at which to stop with what has been found.
            kinds: Kinds of state that may be offloaded.
        """
        key = kinds, group
        bound, asked = self._found.get(key, (0.0, 0.0))
        # One below what was asked for is one of the problem, whatever is asked for.
        if asked <= bound < below:
            family = self._family(group, group.counts, below, kinds)
            # A pipeline with a stage that is left out takes at least as long.
            bound = below
            if family.heads:
                bound = min(
                    below, solve_family(family, below=below, deadline=deadline, tolerance=OPTIONS.bound_tolerance).bound
                )
            self._found[key] = bound, below
        return min(bound, below)

    def open_stages(
        self, group: PipelineGroup, counts: Sequence[int], below: float, kinds: frozenset[str]
    ) -> OpenStages:
        """What stages can have of pipelines with some of a group's numbers of stages that take less than ``below``."""
        return open_stages(self._family(group, counts, below, kinds), below)

    def _family(self, group: PipelineGroup, counts: Sequence[int], below: float, kinds: frozenset[str]) -> Family:
        """The pipelines that take fewer seconds than ``below``, with lower bounds of stages for choices."""
        bottleneck = below / group.num_microbatches * ROOM
        order = group.parts
        made = [self.parts[part].choices(group.num_microbatches, bottleneck, kinds) for part in order]
        if len(order) == 1:
            return Family.of(self.num_layers, self.num_devices, group.num_microbatches, counts, made[0], order)
        joined: dict[tuple[int, ...], SlotChoices] = {}
        numbers = range(len(order))

        def choices(stage_index: int, num_stages: int) -> SlotChoices:
            is_first, is_last = not stage_index, stage_index == num_stages - 1
            of_parts = numbers[:1] if is_first else numbers[-1:] if is_last else numbers
            found = [made[number](stage_index, num_stages) for number in of_parts]
            key = tuple(map(id, found))
            if key not in joined:
                some: list[SlotChoices] = []
                for number, item in zip(of_parts, found, strict=True):
                    front = None if is_first else order[max(number - 1, 0)]
                    behind = None if is_last else order[min(number + 1, numbers[-1])]
                    seams = self.parts[order[number]].seams(group.num_microbatches)
                    some += seams.at(item, front, behind, bottleneck)
                joined[key] = SlotChoices.joined(some)
            # What several stages may be is the same object for all of them.
            return joined[key]

        return Family.of(self.num_layers, self.num_devices, group.num_microbatches, counts, choices, order)


def open_stages(family: Family, below: float) -> OpenStages:
    """What stages can have of pipelines that take fewer seconds than something.

    Args:
        family: The pipelines.
    """
    shape = max(family.num_devices) + 1, family.num_layers + 1
    places = 1 if len(family.num_devices) == 1 else len(family.num_devices) * ANY_SEAMS
    nothing = OpenStages(
        counts=(), slowest=0.0, heads_NL=np.zeros((0, *shape), bool), tails_NL=np.zeros((0, places, *shape), bool)
    )
    if not family.heads:
        return nothing
    suffixes = Suffixes(family)
    walk = _slowest(suffixes, family.num_microbatches, below)
    if walk is None:
        return nothing
    masks = {count: np.zeros(shape, dtype=bool) for count in family.heads}
    tails_NL = np.zeros((len(family.tails), places, *shape), dtype=bool)
    for item in matching(suffixes, walk, family.num_microbatches, suffixes.least_bottleneck(), below):
        slot, at_K = family.heads[item.behind + 1] if item.is_head else family.tails[item.behind], item.choice_K
        if item.is_head:
            masks[item.behind + 1][slot.devices_K[at_K], slot.layers_K[at_K]] = True
        else:
            place_K = slot.part_K[at_K] * ANY_SEAMS + item.seams_K
            tails_NL[item.behind, place_K, slot.devices_K[at_K], slot.layers_K[at_K]] = True
    counts = tuple(count for count, mask_NL in sorted(masks.items()) if mask_NL.any())
    heads_NL = np.stack([masks[count] for count in counts]) if counts else nothing.heads_NL
    return OpenStages(counts=counts, slowest=walk.bottleneck, heads_NL=heads_NL, tails_NL=tails_NL)


def _slowest(suffixes: Suffixes, num_microbatches: int, below: float) -> SuffixWalk | None:
    """A pass at the steady seconds that no stage of a pipeline exceeds that is fast enough, if one can be."""
    others = num_microbatches - 1
    bottleneck, walk = below / num_microbatches, None
    for _ in range(OPTIONS.bound_passes if others else 1):
        walk = suffixes.walk(bottleneck)
        least = min(walk.values.values(), default=np.inf)
        if least >= below * ROOM:
            return None
        if others:
            bottleneck = min(bottleneck, (below - least) / others * ROOM)
    return walk
