"""An exact dynamic program for the inter-stage problem: an answer, and a bound that proves how good it is.

With ``D = max(0, max_i (d_i - sum_{j<i} t_j))`` the part ``sum t + D`` of the objective equals

    v = max(sum_j t_j, max_i (d_i + sum_{j>=i} t_j)),

which can be built from the last stage to the first: putting a stage ``(t, d)`` in front turns a suffix with sum ``s``
and value ``v`` into ``s + t`` and ``max(v, s + t + d)``; at the end the sum itself counts. So

* without a cap, the least ``s + max(0, d_0)`` with every ``t_i <= T`` is a bound on ``v``, and one pass over the
  stages (:mod:`lightning_mist.tuner.inter_stage.suffix_dp`);
* with a cap, the least suffix sum for which every ``s + t + d <= V`` tells in one pass whether ``v <= V`` is possible:
  a smaller suffix sum never hurts;
* bisection on ``V`` between the two gives the least ``v`` for a ``T``, and a best-first search over intervals of ``T``
  the least ``(G - 1) T + v``: as ``v`` falls when ``T`` rises, it is at least ``(G - 1) T_1 + v(T_2)`` on an interval
  ``[T_1, T_2]``.

A pass answers for every number of stages, so that all pipelines with the same microbatches are searched as one.

Array axes
    K  choices of a slot, or their steady times
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import thread_time

import numpy as np

from lightning_mist.cost.inputs import FloatArray
from lightning_mist.tuner.inter_stage.problem import PRECISION, Answer, Family, InterStageProblem
from lightning_mist.tuner.inter_stage.suffix_dp import Suffixes, SuffixWalk

_NOTED = 3
"""Numbers of stages whose answer is looked at after a pass, those with the least sums."""

_NONE = Answer(chosen=(), objective=np.inf, bound=np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyAnswer:
    """The best answer of a family of pipelines.

    Attributes:
        num_stages: Number of stages of the best answer; 0 if none was found.
        answers: Answers by number of stages that were met on the way, among them the best of all; what is proven is
            about all of the family, so each has the same bound.
        bound: No answer of the family takes fewer seconds; infinite if there cannot be one.
    """

    num_stages: int
    answers: dict[int, Answer]
    bound: float


def solve(problem: InterStageProblem, *, below: float = np.inf, deadline: float = np.inf) -> Answer:
    """The best answer, if one takes fewer seconds than ``below``.

    Args:
        below: Answers that do not take fewer seconds are of no interest.
        deadline: Value of ``thread_time()`` at which to stop with what has been found.

    Returns:
        The best answer and a bound. Without an answer below ``below`` the choice is empty and the bound is the least
        that any answer takes, as far as it was found out; infinite if the problem has no answer at all.
    """
    if any(not len(slot) for slot in problem.slots):
        return _NONE
    if len(problem.slots) > 1:
        found = solve_family(problem.alone(), below=below, deadline=deadline)
        none = Answer(chosen=(), objective=np.inf, bound=found.bound)
        return found.answers[found.num_stages] if found.num_stages else none
    slot = problem.slots[0]
    best = _least_of_single(problem, problem.num_microbatches * slot.steady_K + np.maximum(slot.boundary_K, 0.0))
    if best is None:
        return _NONE
    objective = problem.objective((best,))
    if objective < below:
        return Answer(chosen=(best,), objective=objective, bound=objective)
    return Answer(chosen=(), objective=np.inf, bound=objective)


def solve_family(
    family: Family, *, below: float = np.inf, deadline: float = np.inf, tolerance: float = PRECISION
) -> FamilyAnswer:
    """The best answer of any number of stages that takes less than ``below`` seconds; arguments as of :func:`solve`.

    Args:
        tolerance: Share by which the answer may take longer than its bound says.
    """
    return _Search(Suffixes(family), below, deadline, tolerance=tolerance).run()


def solve_each(family: Family, below: Mapping[int, float], *, deadline: float = np.inf) -> dict[int, Answer]:
    """About the best answer of every number of stages of a family, where it takes fewer seconds than something.

    With each comes the best of those whose slowest stage takes less: the next on the frontier of the time of the
    slowest stage and that of all, which the clock may find to be faster.

    Args:
        below: By number of stages the seconds from which on answers are of no interest; others are not looked at.
        deadline: Value of ``thread_time()`` at which to stop with what has been found.
    """
    found: dict[int, Answer] = {}
    asked = sorted(below.keys() & family.heads.keys())
    if not asked:
        return found
    suffixes = Suffixes(family)
    for count in asked:
        result = _Search(suffixes, below[count], deadline, only=count).run()
        if result.num_stages:
            best = result.answers[count]
            slowest = float(family.problem(count).steady(best.chosen).max())
            search = _Search(suffixes, below[count], deadline, only=count, slowest=slowest)
            other = search.run().answers.get(count, _NONE)
            found[count] = replace(best, lower_bottleneck=other.chosen)
    return found


def least_peak(problem: InterStageProblem) -> tuple[float, tuple[int, ...]] | None:
    """Choices whose largest steady "time" is least; used with peak bytes in place of seconds.

    Returns:
        The value and the choices, or ``None`` if the problem has no answer.
    """
    if any(not len(slot) for slot in problem.slots):
        return None
    if len(problem.slots) == 1:
        best = _least_of_single(problem, problem.slots[0].steady_K)
        return None if best is None else (float(problem.slots[0].steady_K[best]), (best,))
    suffixes = Suffixes(problem.alone())
    walk = suffixes.first_walk(suffixes.bottlenecks())
    return None if walk is None else (walk.bottleneck, suffixes.chosen(walk, len(problem.slots)))


def _least_of_single(problem: InterStageProblem, value_K: FloatArray) -> int | None:
    """The choice of a single stage with the least value."""
    fits_K = problem.uses_all()
    best = int(np.where(fits_K, value_K, np.inf).argmin())
    return best if fits_K[best] else None


class _Search:
    """Best-first search over the slowest stage's steady time, of one number of stages or of all."""

    def __init__(
        self,
        suffixes: Suffixes,
        below: float,
        deadline: float,
        *,
        only: int | None = None,
        slowest: float = np.inf,
        tolerance: float = PRECISION,
    ) -> None:
        self.suffixes, self.family, self.below, self.deadline = suffixes, suffixes.family, below, deadline
        self._tolerance, self.only = tolerance, only
        num_microbatches = self.family.num_microbatches
        self.repeats = num_microbatches - 1
        self.objective = below
        self.num_stages = 0
        self.found: dict[int, tuple[float, tuple[int, ...]]] = {}
        # A pipeline takes at least G times the steady time of any of its stages.
        bottlenecks_K = suffixes.bottlenecks()
        bottlenecks_K = bottlenecks_K[bottlenecks_K < slowest * (1 - PRECISION)]
        self.is_cut = bool(bottlenecks_K.size and bottlenecks_K[-1] * num_microbatches >= below)
        self.bottlenecks_K = bottlenecks_K[bottlenecks_K * num_microbatches < below]
        # Bound on the objective, first and last bottleneck time, and bound on v at these bottleneck times.
        self.intervals: list[tuple[float, int, int, float]] = []

    @property
    def tolerance(self) -> float:
        """Share by which what is found may take longer than is proven; that there is nothing is proven exactly."""
        return self._tolerance if self.num_stages else PRECISION

    def run(self) -> FamilyAnswer:
        """The best answer below the given objective."""
        first = int(np.searchsorted(self.bottlenecks_K, self.suffixes.least_bottleneck() * (1 - PRECISION)))
        bound = self.below if self.is_cut else np.inf
        if first < len(self.bottlenecks_K):
            bound = min(bound, self._explore(first, len(self.bottlenecks_K) - 1))
        bound = min(bound, self.objective)
        self._settle()
        answers = {
            count: Answer(chosen=chosen, objective=objective, bound=min(bound, objective))
            for count, (objective, chosen) in self.found.items()
        }
        return FamilyAnswer(num_stages=self.num_stages, answers=answers, bound=bound)

    def _explore(self, first: int, last: int) -> float:
        """Look at all bottleneck times between two; returns a bound on the objective there."""
        walk = self._walk(float(self.bottlenecks_K[last]))
        if not walk.values:
            return np.inf
        bound, low = np.inf, min(walk.values.values())
        self._note(walk)
        self._push(first, last, low)
        while self.intervals:
            bound_here, begin, end, low = heapq.heappop(self.intervals)
            if bound_here >= self.objective * (1 - self.tolerance) or thread_time() > self.deadline:
                return min(bound, bound_here)
            middle, end = self._middle(begin, end, low)
            value, reached, proven = self._value(middle, begin)
            bound = min(bound, proven)
            self._push(begin, reached - 1, value)
            self._push(middle + 1, end, low)
        return bound

    def _settle(self) -> None:
        """Of equally good answers take one that depends on the problem alone, and not on the passes that led to it."""
        if not self.num_stages:
            return
        steady, objective = self._costs(self.num_stages, self.found[self.num_stages][1])
        walk = self._walk(steady, (objective - self.repeats * steady) * (1 + PRECISION))
        if self.num_stages in walk.values:
            chosen = self.suffixes.chosen(walk, self.num_stages)
            if (objective := self._costs(self.num_stages, chosen)[1]) <= self.objective * (1 + PRECISION):
                self.objective = objective
                self.found[self.num_stages] = objective, chosen

    def _walk(self, bottleneck: float, cap: float | None = None) -> SuffixWalk:
        # The most that the steady times of a better answer can be together.
        limit = (self.objective - self.repeats * self.suffixes.least_bottleneck()) * (1 + PRECISION)
        return self.suffixes.walk(bottleneck, cap, self.only, limit)

    def _middle(self, begin: int, end: int, low: float) -> tuple[int, int]:
        """A bottleneck time to look at, and the last one of an interval that can still lead to a better answer."""
        if not self.repeats:
            return end, end
        worth = int(np.searchsorted(self.bottlenecks_K, (self.objective - low) / self.repeats, "right")) - 1
        end = max(begin, min(end, worth))
        # Between the bottleneck times, not between their numbers: what lies far from the least one soon drops out.
        middle = (
            int(np.searchsorted(self.bottlenecks_K, (self.bottlenecks_K[begin] + self.bottlenecks_K[end]) / 2, "right"))
            - 1
        )
        return min(max(middle, begin), end), end

    def _push(self, begin: int, end: int, low: float) -> None:
        if begin <= end:
            heapq.heappush(self.intervals, (self.repeats * float(self.bottlenecks_K[begin]) + low, begin, end, low))

    def _value(self, index: int, begin: int) -> tuple[float, int, float]:
        """What steady times up to a bottleneck time can give.

        Args:
            begin: The least bottleneck time that is still of interest.

        Returns:
            The least ``v``, or a lower bound of it that proves that no bottleneck time from ``begin`` to this one is of
            interest; the bottleneck time of the answer that reaches ``v``; and a bound on the objective from that one
            to this one. Without any answer up to here nothing below is of interest either: ``begin``, and infinities.
        """
        bottleneck, floor = float(self.bottlenecks_K[index]), float(self.bottlenecks_K[begin])
        walk = self._walk(bottleneck)
        if not walk.values:
            return np.inf, begin, np.inf
        low = min(walk.values.values())
        high, reached = self._note(walk)
        reached = max(begin, reached)
        is_best = True  # First ask whether anything beats what is there, then halve the difference, in turn.
        while high - low > self.tolerance * high and self.repeats * floor + low < self.objective * (1 - self.tolerance):
            worth = self.objective - self.repeats * floor
            cap = min(high, worth) * (1 - PRECISION) if is_best else (low + min(high, worth)) / 2
            is_best = not is_best
            walk = self._walk(bottleneck, cap)
            if not walk.values:
                low = max(low, cap)
            else:
                value, at = self._note(walk)
                high, reached = value, max(begin, at)
        return low, reached, self.repeats * float(self.bottlenecks_K[reached]) + low

    def _note(self, walk: SuffixWalk) -> tuple[float, int]:
        """Remember the best answers of a pass; returns the ``v`` of the one with the least sum, and its bottleneck."""
        best = np.inf, 0
        for num_stages in sorted(walk.values, key=walk.values.__getitem__)[:_NOTED]:
            chosen = self.suffixes.chosen(walk, num_stages)
            steady, objective = self._costs(num_stages, chosen)
            if objective < self.found.get(num_stages, (np.inf,))[0]:
                self.found[num_stages] = objective, chosen
            if objective < self.objective:
                self.objective, self.num_stages = objective, num_stages
            value = objective - self.repeats * steady
            if value < best[0]:
                best = value, int(np.searchsorted(self.bottlenecks_K, steady))
        return best

    def _costs(self, num_stages: int, chosen: tuple[int, ...]) -> tuple[float, float]:
        """Steady seconds of the slowest stage of an answer, and its step seconds."""
        problem = self.family.problem(num_stages)
        return float(problem.steady(chosen).max()), problem.objective(chosen)
