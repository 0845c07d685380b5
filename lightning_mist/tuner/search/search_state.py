"""What a search has found and proven so far."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import thread_time

import numpy as np

from lightning_mist.tuner.inter_stage import PRECISION, Incumbent, Pipeline, PipelineGroup, solve, solve_each
from lightning_mist.tuner.search.pipelines import Pipelines

NEAR_RESIDENT = 1.05
"""Multiple of the best plan's seconds by the closed form below which every pipeline is solved with all state resident,
to be run on the clock and tried under other schedules: for 2.7 billion parameters on 4 L4 one that takes 3.7 % longer
by the form wins so."""

NEAR_OFFLOADED = 1.015
"""The same with what may be offloaded, of which evaluating all that are so near takes most of a search. With 1.02 and
1.03 the plans of all questions in the record ``plan-hashes-after_amd-epyc-2-cores_202611.json`` are the same."""

FIRST_SECONDS = 1.0
"""Seconds that a search may take until it has a plan, however little time it is given: with less it says nothing."""


@dataclass(slots=True, kw_only=True)
class SearchState:
    """What a search has found and proven so far.

    Attributes:
        bounds: Step seconds that no plan of each pipeline goes below.
        deadline: Value of ``thread_time()`` at which to stop.
        patience: The same as long as there is no plan.
        found: The best answers of pipelines, proven of the whole space.
        met: Answers of pipelines that need not be the best.
        below: Step seconds of a plan that is known beforehand.
        is_stopped: Whether some were not because time was up.
    """

    pipelines: Pipelines
    bounds: dict[Pipeline, float]
    deadline: float
    patience: float
    below: float = np.inf
    found: dict[Pipeline, Incumbent] = field(default_factory=dict)
    met: dict[Pipeline, Incumbent] = field(default_factory=dict)
    solved: set[Pipeline] = field(default_factory=set)
    is_stopped: bool = False

    @classmethod
    def of(cls, pipelines: Pipelines, deadline: float, below: float, known: Mapping[Pipeline, float]) -> "SearchState":
        """Before anything is found, with ``deadline`` as ``thread_time()`` tells it, and some ``known`` bounds."""
        patience, quick = max(deadline, thread_time() + FIRST_SECONDS), pipelines.quick_bounds()
        bounds = {key: max(bound, known.get(key, 0.0)) for key, bound in quick.items()}
        return cls(pipelines=pipelines, bounds=bounds, deadline=deadline, patience=patience, below=below)

    def wait_again(self) -> None:
        """Give a search without a plan as much time again as it has at least."""
        self.patience = thread_time() + FIRST_SECONDS

    @property
    def end(self) -> float:
        """When time is up."""
        return self.deadline if self.found or self.met else self.patience

    @property
    def is_late(self) -> bool:
        """Whether time is up."""
        return thread_time() > self.end

    @property
    def least(self) -> float:
        """The least step seconds that are known."""
        every = (*self.found.values(), *self.met.values())
        return min([self.below, *(item.answer.objective for item in every)])

    @property
    def near(self) -> float:
        """Multiple of the least step seconds below which every pipeline of the space is solved.

        Where a plan is known beforehand only better ones are: whether there are any is the question.
        """
        if self.below < np.inf:
            return 1.0
        return NEAR_OFFLOADED if self.pipelines.space.offload_ratios else NEAR_RESIDENT

    @property
    def winner(self) -> tuple[Pipeline, Incumbent] | None:
        """The best answer and its pipeline; of equally good ones that with the fewest stages."""
        every = [*self.found.items(), *self.met.items()]
        return min(every, key=lambda item: (item[1].answer.objective, item[0]), default=None)

    def bound_of(self, group: PipelineGroup) -> float:
        """Step seconds that no plan of a group is known to go below."""
        return min(self.bounds[group.pipeline(count)] for count in group.counts)

    def raise_bound(self, group: PipelineGroup, below: float) -> float:
        """The same with what the memory of stages says, as far as it is less than ``below``."""
        lowest = self.bound_of(group)
        if lowest >= below * (1 - PRECISION) or below == np.inf or group.counts == (1,):
            return lowest
        bound = self.pipelines.lower_bound(group, below, self.end)
        for count in group.counts:
            key = group.pipeline(count)
            self.bounds[key] = max(self.bounds[key], bound)
        return self.bound_of(group)

    def nearest(self, groups: Iterable[PipelineGroup], cutoff: Callable[[], float]) -> Iterator[PipelineGroup]:
        """Groups that may take fewer seconds than a cutoff, those with the least bounds first.

        Bounds are raised as groups come, so that none is that a lower cutoff by then rules out.

        Args:
            cutoff: Seconds, which may fall.
        """
        waiting = [(self.bound_of(group), False, group) for group in groups]
        heapq.heapify(waiting)
        while waiting:
            bound, is_raised, group = heapq.heappop(waiting)
            # What was proven of a pipeline before is so but for rounding.
            if bound >= cutoff() * (1 - PRECISION):
                return
            if is_raised:
                yield group
            else:
                heapq.heappush(waiting, (self.raise_bound(group, cutoff()), True, group))

    def optima(self, group: PipelineGroup, counts: list[int], below: float) -> dict[Pipeline, Incumbent]:
        """The best answers of some numbers of stages of a group that take fewer seconds than ``below``.

        Raises:
            TimeIsUpError: If there is no time left to evaluate their stages.
        """
        self.solved |= {group.pipeline(count) for count in counts}
        if group.counts == (1,):
            problem = self.pipelines.single(group.num_microbatches, below=below)
            answers = {1: solve(problem, below=below, deadline=self.deadline)}
            problems = {1: problem}
        else:
            family = self.pipelines.family(group, counts, below=below)
            answers = solve_each(family, dict.fromkeys(family.heads, below), deadline=self.deadline)
            problems = {count: family.problem(count) for count in answers}
        return {
            group.pipeline(count): Incumbent(problem=problems[count], answer=answer)
            for count, answer in answers.items()
            if answer.chosen
        }

    def meet(self, key: Pipeline, item: Incumbent) -> None:
        """Remember an answer that need not be the best."""
        if key not in self.met or item.answer.objective < self.met[key].answer.objective:
            self.met[key] = item
