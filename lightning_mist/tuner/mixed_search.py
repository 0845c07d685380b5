"""The search loop on unlike devices: pipelines in the order of what they take at least.

As :mod:`lightning_mist.tuner.search`, with families of pipelines that differ only in how many stages the part in front
has: what lies behind it, in which order, is another family each time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np

from lightning_mist.tuner.bound import solve, solve_each, solve_family
from lightning_mist.tuner.checked import Checked, check
from lightning_mist.tuner.mixed import Group, MixedStages
from lightning_mist.tuner.near_optimal import COMPARED, compared
from lightning_mist.tuner.offload_search import TimeIsUpError
from lightning_mist.tuner.problem import PRECISION, Incumbent
from lightning_mist.tuner.search import ASSUMED, FIRST_SECONDS, Outcome
from lightning_mist.tuner.tally import NEAR


def search_mixed(stages: MixedStages, deadline: float) -> Outcome:
    """The best pipeline on unlike devices, proven; and good ones with other numbers of stages.

    Args:
        stages: What stages may be.
        deadline: Value of ``perf_counter()`` at which to stop with what has been found.
    """
    search = _Search(stages, deadline)
    least = min(search.lower.values(), default=np.inf)
    for factor in ASSUMED if search.lower else ():
        assumed = least * factor if least else np.inf
        search.look(stages.groups, lambda assumed=assumed: min(search.least(), assumed))  # type: ignore[misc]
        # What was met on the way may take longer than what was assumed, and prove nothing.
        if search.least() < assumed or search.is_late:
            break
    winner, bound = search.winner, min(search.bounds.values(), default=np.inf)
    if winner is None:
        return search.outcome(bound)
    checked = check(search.best[winner], deadline)
    search.keep(checked.found)
    if checked.refutes:
        bound = 0.0  # Nothing that has been proven can be relied on.
    search.solve_near(checked.found)
    for count in compared(stages.space, winner):
        others = [group._replace(counts=(count,)) for group in stages.groups if count in group.counts]
        search.look(others, partial(_less, search, count))
    return search.outcome(bound, checked)


def _less(search: "_Search", num_stages: int) -> float:
    """Seconds that a plan with a number of stages must take less than to be of interest."""
    return min(search.known(num_stages), search.least() * COMPARED)


class _Search:
    """Solves families of pipelines and remembers the best answers.

    Attributes:
        lower: Step seconds that no pipeline goes below, by numbers of stages and microbatches.
        bounds: The same of every pipeline, by what has been proven.
        best: The best answer of every number of stages.
    """

    def __init__(self, stages: MixedStages, deadline: float) -> None:
        self.stages, self.deadline = stages, deadline
        self.patience = max(deadline, perf_counter() + FIRST_SECONDS)
        for item in (*stages.parts, stages.together):
            item.try_ratios(item.space.offload_ratios, self.patience)
        self.is_stopped = False
        self.best: dict[int, Incumbent] = {}
        self.solved = 0
        self._found: dict[tuple[int, int], Incumbent] = {}
        numbers = {(count, group.num_microbatches) for group in stages.groups for count in group.counts}
        self.lower = {number: stages.bound(*number) for number in numbers}
        self.bounds = {
            (*group[:3], count): self.lower[count, group.num_microbatches]
            for group in stages.groups
            for count in group.counts
        }

    @property
    def is_late(self) -> bool:
        """Whether time is up."""
        return perf_counter() > (self.deadline if self.best else self.patience)

    @property
    def winner(self) -> int | None:
        """The number of stages of the best answer."""
        return min(self.best, key=lambda count: (self.known(count), count), default=None)

    def known(self, num_stages: int) -> float:
        """The least step seconds found with a number of stages."""
        return self.best[num_stages].answer.objective if num_stages in self.best else np.inf

    def least(self) -> float:
        """The least step seconds found."""
        return min((found.answer.objective for found in self.best.values()), default=np.inf)

    def look(self, groups: Sequence[Group], below: Callable[[], float]) -> None:
        """Solve families, in the order of their bounds, as long as one may take less than what is asked for."""

        def lowest(group: Group) -> float:
            return min(self.lower[count, group.num_microbatches] for count in group.counts)

        for group in sorted(groups, key=lambda item: (lowest(item), item)):
            if lowest(group) >= below():
                return
            if self.is_late:
                self.is_stopped = True
                return
            try:
                self._attempt(group, below())
            except TimeIsUpError:
                self.is_stopped = True
                return

    def solve_near(self, winner: Incumbent) -> None:
        """Solve every pipeline near the best by itself, and forget others, which depend on the order of the search."""
        if self.is_late:
            return
        met, most = (self.best, self._found), winner.answer.objective * NEAR
        self.best, self._found = {}, {}
        try:
            for group in self.stages.groups:
                counts = [count for count in group.counts if self.lower[count, group.num_microbatches] < most]
                if counts == [1]:
                    self._attempt(group, most)
                elif counts:
                    family = self.stages.family(group, counts, below=most)
                    below = dict.fromkeys(family.heads, most)
                    for count, answer in solve_each(family, below, deadline=self.deadline).items():
                        self.keep(Incumbent(problem=family.problem(count), answer=answer))
        except TimeIsUpError:
            self.best, self._found = met
            return
        same = self._found.get((len(winner.answer.chosen), winner.problem.num_microbatches))
        if same is None or same.answer.objective > winner.answer.objective * (1 + PRECISION):
            self.keep(winner)

    def _attempt(self, group: Group, below: float) -> None:
        counts = [count for count in group.counts if self.lower[count, group.num_microbatches] < below]
        self.solved += len(counts)
        if counts == [1]:
            problem = self.stages.single(group.num_microbatches, below=below)
            answer = solve(problem, below=below, deadline=self.deadline)
            bound = answer.bound
            if answer.chosen:
                self.keep(Incumbent(problem=problem, answer=answer))
        else:
            bound, family = below, self.stages.family(group, counts, below=below)
            if family.heads:
                result = solve_family(family, below=below, deadline=self.deadline)
                bound = result.bound
                for count, answer in result.answers.items():
                    self.keep(Incumbent(problem=family.problem(count), answer=answer))
        # A plan with a stage that was left out of the problem takes at least ``below``.
        for count in counts:
            key = (*group[:3], count)
            self.bounds[key] = max(self.bounds[key], min(below, bound))

    def keep(self, found: Incumbent) -> None:
        """Remember an answer, if it is the best of its numbers of stages and microbatches."""
        count, objective = len(found.answer.chosen), found.answer.objective
        key = count, found.problem.num_microbatches
        if key not in self._found or objective < self._found[key].answer.objective:
            self._found[key] = found
        if objective < self.known(count):
            self.best[count] = found

    def outcome(self, bound: float, checked: Checked | None = None) -> Outcome:
        """What is known, with a bound of the search as a whole."""
        return Outcome(
            best=self.best,
            found=self._found,
            winner=self.winner,
            bound=bound,
            certified=checked is not None and checked.certified,
            pipelines=len(self.bounds),
            solved=self.solved,
            notes=checked.notes if checked is not None else (),
            is_late=self.is_stopped,
        )
