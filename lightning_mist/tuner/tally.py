"""What a search has found so far, and the problems that it makes of pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import numpy as np

from lightning_mist.tuner.family_floors import FamilyFloors
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.problem import PRECISION, Family, Incumbent, InterStageProblem, places_behind
from lightning_mist.tuner.space import Space

Group = tuple[tuple[int, ...], int]
"""Numbers of stages that are solved together, and the number of microbatches."""

HEADROOM = 1.05
"""Multiple of the seconds that bounds are asked for up to which they are found out, for searches with less memory."""

NEAR = 1.05
"""Multiple of the best plan's seconds by the closed form below which every pipeline is solved, to be run on the clock
and tried under other schedules: for 2.7 billion parameters on 4 L4 one that takes 3.7 % longer by the form wins so."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What there is to search, and what has been found.

    Attributes:
        intra: Makes choices.
        space: The search space.
        lower: Step seconds that no plan of a pipeline goes below, by a cheap estimate.
        deadline: When to stop.
        patience: When to stop without a plan.
        bounds: The same by what has been proven.
        floors: Bounds of families that know the memory.
        proven: Step seconds that no plan of a pipeline goes below, by bounds of all that may be moved.
        best: The best answer of every number of stages.
        found: The best answer of every pipeline.
        solved: Pipelines that were solved.
        is_stopped: Whether some were not because time was up.
    """

    intra: IntraStage
    space: Space
    lower: dict[tuple[int, int], float]
    deadline: float
    patience: float
    bounds: dict[tuple[int, int], float]
    floors: FamilyFloors
    best: dict[int, Incumbent] = field(default_factory=dict)
    found: dict[tuple[int, int], Incumbent] = field(default_factory=dict)
    solved: set[tuple[int, int]] = field(default_factory=set)
    is_stopped: bool = False
    proven: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        """Whether time is up."""
        return perf_counter() > (self.deadline if self.best else self.patience)

    @property
    def least(self) -> float:
        """The least step seconds found."""
        return min((found.answer.objective for found in self.best.values()), default=np.inf)

    def least_of(self, num_stages: int) -> float:
        """The least step seconds found with a number of stages."""
        return self.best[num_stages].answer.objective if num_stages in self.best else np.inf

    def least_in(self, counts: tuple[int, ...], num_microbatches: int) -> float:
        """The least step seconds found of some pipelines."""
        known = (self.found[key] for key in ((count, num_microbatches) for count in counts) if key in self.found)
        return min((found.answer.objective for found in known), default=np.inf)

    def floor(self, counts: tuple[int, ...], num_microbatches: int, below: float) -> float:
        """Step seconds that no plan of some pipelines goes below, as far as they are less than ``below``."""
        keys = [(count, num_microbatches) for count in counts]
        lowest = min(self.lower[key] for key in keys)
        if lowest >= below * (1 - PRECISION) or below == np.inf or counts == (1,):
            return lowest
        deadline, most = self.deadline if self.best else self.patience, below * HEADROOM
        bound = self.floors.bound(counts, num_microbatches, most, deadline, below * NEAR)
        for key in keys:
            self.bounds[key] = max(self.bounds[key], bound)
            self.proven[key] = max(self.proven.get(key, 0.0), bound)
        return max(lowest, bound)

    def note(self, found: Incumbent) -> None:
        """Remember an answer."""
        count, objective = len(found.answer.chosen), found.answer.objective
        key = count, found.problem.num_microbatches
        if key not in self.found or objective < self.found[key].answer.objective:
            self.found[key] = found
        if objective < self.least_of(count):
            self.best[count] = found


def single_stage(intra: IntraStage, space: Space, num_microbatches: int, below: float) -> InterStageProblem:
    """The choices of a single stage, without those that take at least ``below`` seconds."""
    return InterStageProblem(
        num_layers=space.num_layers,
        num_devices=(space.world_size,),
        num_microbatches=num_microbatches,
        slots=(intra.frontier(0, 1, num_microbatches, below / num_microbatches),),
    )


def family_of(tally: Tally, counts: Sequence[int], num_microbatches: int, below: float) -> Family:
    """The choices of all stages, without those that only plans of at least ``below`` seconds can have."""
    sizes = tally.space.num_layers, (tally.space.world_size,)
    if below == np.inf:
        frontier = partial(tally.intra.frontier, num_microbatches=num_microbatches)
        return Family.of(*sizes, num_microbatches, counts, frontier)
    among = tally.floors.narrowed(counts, num_microbatches, below)
    places = [*places_behind(among.counts), *((0, count) for count in among.counts)]
    asked = [(*place, (), among.of(*place)) for place in places]
    found = dict(zip(places, tally.intra.frontiers(asked, num_microbatches, among.slowest), strict=True))
    return Family.of(*sizes, num_microbatches, among.counts, lambda *place: found[place])
