"""The search loop on unlike devices: every pipeline in the order of what it takes at least."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np

from lightning_mist.tuner.bound import solve
from lightning_mist.tuner.inter_stage import solve_program
from lightning_mist.tuner.mixed import MixedStages, Pipeline
from lightning_mist.tuner.search import CHECK_SECONDS, Found, Outcome, compared


def search_mixed(stages: MixedStages, deadline: float) -> Outcome:
    """The best pipeline on unlike devices, proven; and good ones with other numbers of stages.

    As :func:`~lightning_mist.tuner.search.search_pipelines`: pipelines come in the order of a cheap bound of their step
    seconds, each is solved exactly, and HiGHS checks the winner.

    Args:
        stages: What stages may be.
        deadline: Value of ``perf_counter()`` at which to stop with what has been found.
    """
    search = _Search(stages, deadline)
    search.look(stages.pipelines, search.least)
    bound = search.bound
    if search.winner is None:
        return search.outcome(bound)
    best = search.best[search.winner]
    checked = solve_program(
        best.problem, time_limit=max(0.1, min(CHECK_SECONDS, deadline - perf_counter())), incumbent=best.answer
    )
    if checked.chosen and checked.objective < best.answer.objective:
        search.keep(Found(problem=best.problem, answer=checked))
    for count in compared(stages.space, search.winner):
        others = [item for item in stages.pipelines if item.num_stages == count]
        search.look(others, partial(search.known, count))
    return search.outcome(bound)


class _Search:
    """Solves pipelines and remembers the best answers."""

    def __init__(self, stages: MixedStages, deadline: float) -> None:
        self.stages, self.deadline = stages, deadline
        self.best: dict[int, Found] = {}
        self.found: dict[tuple[int, int], Found] = {}
        self.bound, self.solved = np.inf, 0
        numbers = {pipeline[:2] for pipeline in stages.pipelines}
        self._lower = {number: stages.bound(*number) for number in numbers}

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

    def look(self, pipelines: Sequence[Pipeline], below: Callable[[], float]) -> None:
        """Solve pipelines, in the order of their bounds, as long as one may take less than what is known."""
        for pipeline in sorted(pipelines, key=lambda item: (self._lower[item[:2]], item)):
            lower = self._lower[pipeline[:2]]
            if lower >= below() or (perf_counter() > self.deadline and self.best):
                self.bound = min(self.bound, lower)
                return
            self._attempt(pipeline, below())

    def _attempt(self, pipeline: Pipeline, below: float) -> None:
        problem = self.stages.problem(pipeline, below=below)
        # A plan with a stage that was left out of the problem takes at least ``below``.
        bound = min(below, problem.lower_bound())
        if bound < below:
            answer = solve(problem, below=below, deadline=self.deadline)
            self.solved += 1
            bound = min(below, answer.bound)
            if answer.chosen:
                self.keep(Found(problem=problem, answer=answer))
        self.bound = min(self.bound, bound)

    def keep(self, found: Found) -> None:
        """Remember an answer that is better than what was known of its number of stages."""
        count = len(found.problem.slots)
        key = count, found.problem.num_microbatches
        self.best[count] = found
        if key not in self.found or found.answer.objective < self.found[key].answer.objective:
            self.found[key] = found

    def outcome(self, bound: float) -> Outcome:
        """What is known, with a bound of the search as a whole."""
        winner = self.winner
        shown = () if winner is None else (winner, *compared(self.stages.space, winner))
        return Outcome(
            best={count: found for count, found in self.best.items() if count in shown},
            found=self.found,
            winner=winner,
            bound=bound,
            pipelines=len(self.stages.pipelines),
            solved=self.solved,
        )
