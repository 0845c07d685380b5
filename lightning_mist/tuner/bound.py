"""An exact dynamic program for the inter-stage problem: an answer, and a bound that proves how good it is.

With ``D = max(0, max_i (d_i - sum_{j<i} t_j))`` the part ``sum t + D`` of the objective equals

    v = max(sum_j t_j, max_i (d_i + sum_{j>=i} t_j)),

which can be built from the last stage to the first: putting a stage ``(t, d)`` in front turns a suffix with sum ``s``
and value ``v`` into ``s + t`` and ``max(v, s + t + d)``; at the end the sum itself counts. So

* ``relaxed(T)``: the least ``s + max(0, d_0)`` with every ``t_i <= T`` is a bound on ``v``, and one pass over the
  stages;
* ``capped(T, V)``: with the least suffix sum for which every ``s + t + d <= V`` one pass tells whether ``v <= V`` is
  possible: a smaller suffix sum never hurts;
* bisection on ``V`` between the two gives the least ``v`` for a ``T``, and a best-first search over intervals of ``T``
  the least ``(G - 1) T + v``: as ``v`` falls when ``T`` rises, it is at least ``(G - 1) T_1 + v(T_2)`` on an interval
  ``[T_1, T_2]``.

Array axes
    A  first layer of a stage, as an offset from the earliest possible
    E  one past its last layer, as an offset from the earliest possible
    Q  choices with the same layers and devices, by rising steady time
    M  numbers of devices
    U  devices used by a suffix of the stages, in units of their greatest common divisor
    K  choices of a slot
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.tuner.intra_stage import ANYWHERE, SlotChoices
from lightning_mist.tuner.problem import Answer, InterStageProblem
from lightning_mist.tuner.space import common_unit

PRECISION = 1e-9
"""Relative difference of objectives below which two answers count as equal, far below what costs are known to."""

_NONE = Answer(chosen=(), objective=np.inf, bound=np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The choices of one slot with one number of devices, as dense arrays; infinite where there is no choice."""

    units: int
    steady_QAE: FloatArray
    boundary_QAE: FloatArray
    index_QAE: IntArray


def solve(problem: InterStageProblem, *, below: float = np.inf, deadline: float = np.inf) -> Answer:
    """The best answer, if one takes fewer seconds than ``below``.

    Args:
        problem: The problem.
        below: Answers that do not take fewer seconds are of no interest.
        deadline: Value of ``perf_counter()`` at which to stop with what has been found.

    Returns:
        The best answer and a bound. Without an answer below ``below`` the choice is empty and the bound is the least
        that any answer takes, as far as it was found out; infinite if the problem has no answer at all.
    """
    if any(not len(slot) for slot in problem.slots):
        return _NONE
    if len(problem.slots) == 1:
        answer = _solve_single(problem)
        if answer.objective < below:
            return answer
        return Answer(chosen=(), objective=np.inf, bound=answer.bound)
    return _Search(problem, below, deadline).run()


def _solve_single(problem: InterStageProblem) -> Answer:
    slot = problem.slots[0]
    fits_K = (slot.layers_K == problem.num_layers) & (slot.devices_K == problem.num_devices)
    value_K = problem.num_microbatches * slot.steady_K + np.maximum(slot.boundary_K, 0.0)
    value_K = np.where(fits_K, value_K, np.inf)
    best = int(value_K.argmin())
    if not fits_K[best]:
        return _NONE
    objective = problem.objective((best,))
    return Answer(chosen=(best,), objective=objective, bound=objective)


class _Chain:
    """The stages of a problem as tables, and the passes over them."""

    def __init__(self, problem: InterStageProblem) -> None:
        self.problem = problem
        self.width = problem.num_layers - len(problem.slots) + 1
        counts = {int(count) for slot in problem.slots for count in np.unique(slot.devices_K)}
        unit = common_unit([*counts, problem.num_devices])
        self.units = problem.num_devices // unit
        self.tables = [self._tables(index, slot, unit) for index, slot in enumerate(problem.slots)]

    def _tables(self, stage: int, slot: SlotChoices, unit: int) -> list[_Table]:
        return [
            self._table(stage, slot, np.flatnonzero(slot.devices_K == count), int(count) // unit)
            for count in np.unique(slot.devices_K)
        ]

    def _table(self, stage: int, slot: SlotChoices, index_K: IntArray, units: int) -> _Table:
        """Stage ``i`` starts at layer ``i + a`` and ends before ``i + 1 + e``, with ``0 <= a <= e < width``."""
        index_K = index_K[np.argsort(slot.steady_K[index_K], kind="stable")]
        start_K, layers_K = slot.start_K[index_K], slot.layers_K[index_K]
        is_open_K = start_K == ANYWHERE
        places_K = np.where(is_open_K, self.width, 1)
        copy = np.repeat(np.arange(len(index_K)), places_K)
        shift = np.arange(len(copy)) - np.repeat(np.cumsum(places_K) - places_K, places_K)
        begin = np.where(is_open_K[copy], shift, start_K[copy] - stage)
        end = begin + layers_K[copy] - 1
        inside = (begin >= 0) & (end < self.width)
        copy, cell = copy[inside], (begin * self.width + end)[inside]
        order = np.argsort(cell, kind="stable")
        copy, cell = copy[order], cell[order]
        # Within a cell choices keep their order, by rising steady time.
        rank = np.arange(len(cell)) - np.searchsorted(cell, cell)
        flat = np.full((int(rank.max(initial=0)) + 1, self.width * self.width), -1, dtype=np.int64)
        flat[rank, cell] = index_K[copy]
        index_QAE = flat.reshape(-1, self.width, self.width)
        return _Table(
            units=units,
            steady_QAE=np.where(index_QAE >= 0, slot.steady_K[index_QAE], np.inf),
            boundary_QAE=np.where(index_QAE >= 0, slot.boundary_K[index_QAE], np.inf),
            index_QAE=index_QAE,
        )

    def relaxed(self, slowest: float) -> tuple[float, tuple[int, ...]] | None:
        """The least ``sum t + max(0, d_0)`` with every steady time at most ``slowest``, and choices that reach it."""
        return self._walk(slowest, np.inf)

    def capped(self, slowest: float, cap: float) -> tuple[int, ...] | None:
        """Choices with every steady time at most ``slowest`` and ``sum t + D`` at most ``cap``, if there are any."""
        found = self._walk(slowest, cap)
        return None if found is None or found[0] > cap else found[1]

    def _walk(self, slowest: float, cap: float) -> tuple[float, tuple[int, ...]] | None:
        """From the last stage to the first: the least suffix sums, with every ``suffix sum + d`` at most ``cap``."""
        last = len(self.tables) - 1
        suffix_EU = np.full((self.width, self.units + 1), np.inf)
        suffix_EU[-1, 0] = 0.0
        steps: list[tuple[IntArray, IntArray, IntArray]] = []
        for stage in range(last, -1, -1):
            best_AU = np.full((self.width, self.units + 1), np.inf)
            place_AU = np.full((3, self.width, self.units + 1), -1, dtype=np.int64)
            for number, table in enumerate(self.tables[stage]):
                self._extend(stage, number, table, suffix_EU, best_AU, place_AU, slowest, cap)
            steps.append((place_AU[0], place_AU[1], place_AU[2]))
            suffix_EU = best_AU
            if not np.isfinite(suffix_EU).any():
                return None
        value = float(suffix_EU[0, self.units])
        return (value, self._trace(steps[::-1])) if np.isfinite(value) else None

    def _extend(
        self,
        stage: int,
        number: int,
        table: _Table,
        suffix_EU: FloatArray,
        best_AU: FloatArray,
        place_AU: IntArray,
        slowest: float,
        cap: float,
    ) -> None:
        """Put one number of devices of a stage in front of all suffixes; improves ``best`` and ``place`` in place."""
        room = self.units + 1 - table.units
        if room <= 0:
            return
        rows = slice(0, 1) if stage == 0 else slice(None)
        suffix_1EU = suffix_EU[None, :, :room]
        best_AEU = np.full((1 if stage == 0 else self.width, self.width, room), np.inf)
        which_AEU = np.zeros(best_AEU.shape, dtype=np.int64)
        for choice in range(len(table.steady_QAE)):
            steady_AE1 = table.steady_QAE[choice, rows, :, None]
            boundary_AE1 = table.boundary_QAE[choice, rows, :, None]
            sum_AEU = np.where(steady_AE1 <= slowest, steady_AE1, np.inf) + suffix_1EU
            if np.isfinite(cap):
                sum_AEU = np.where(
                    sum_AEU + np.where(np.isfinite(boundary_AE1), boundary_AE1, 0.0) <= cap, sum_AEU, np.inf
                )
            elif stage == 0:
                sum_AEU = sum_AEU + np.where(np.isfinite(boundary_AE1), np.maximum(boundary_AE1, 0.0), 0.0)
            if choice == 0:
                best_AEU = sum_AEU
            else:
                better = sum_AEU < best_AEU
                best_AEU, which_AEU = np.where(better, sum_AEU, best_AEU), np.where(better, choice, which_AEU)
            if stage > 0 and not np.isfinite(cap):
                break  # Choices come by rising steady time, and nothing else counts here.
        end_AU = best_AEU.argmin(axis=1)
        value_AU = np.take_along_axis(best_AEU, end_AU[:, None, :], axis=1)[:, 0, :]
        which_AU = np.take_along_axis(which_AEU, end_AU[:, None, :], axis=1)[:, 0, :]
        target = (rows, slice(table.units, None))
        better_AU = value_AU < best_AU[target]
        best_AU[target] = np.where(better_AU, value_AU, best_AU[target])
        for place, value in zip(place_AU, (np.full_like(end_AU, number), end_AU, which_AU), strict=True):
            place[target] = np.where(better_AU, value, place[target])

    def _trace(self, steps: list[tuple[IntArray, IntArray, IntArray]]) -> tuple[int, ...]:
        start, units, chosen = 0, self.units, []
        for stage, (number_AU, end_AU, which_AU) in enumerate(steps):
            table = self.tables[stage][int(number_AU[start, units])]
            end, which = int(end_AU[start, units]), int(which_AU[start, units])
            chosen.append(int(table.index_QAE[which, start, end]))
            start, units = end, units - table.units
        return tuple(chosen)


class _Search:
    """Best-first search over the slowest stage's steady time."""

    def __init__(self, problem: InterStageProblem, below: float, deadline: float) -> None:
        self.problem, self.chain, self.deadline = problem, _Chain(problem), deadline
        self.slowest_K = np.unique(np.concatenate([slot.steady_K for slot in problem.slots]))
        self.pace = problem.num_microbatches - 1
        self.objective, self.chosen = below, ()  # type: tuple[float, tuple[int, ...]]
        self.intervals: list[tuple[float, int, int, float]] = []
        self.floor = 0

    def run(self) -> Answer:
        """The best answer below the given objective."""
        last = len(self.slowest_K) - 1
        if self.chain.relaxed(float(self.slowest_K[last])) is None:
            return _NONE
        self.floor = self._fastest(last)
        low, reached, bound = self._value(last)
        self._push(self.floor, reached - 1, low)
        while self.intervals:
            bound_here, begin, end, low = heapq.heappop(self.intervals)
            if bound_here >= self.objective * (1 - PRECISION):
                return self._answer(min(bound, bound_here))
            if perf_counter() > self.deadline:
                return self._answer(min(bound, bound_here))
            middle = (begin + end) // 2
            value, reached, proven = self._value(middle)
            bound = min(bound, proven)
            self._push(begin, reached - 1, value)
            self._push(middle + 1, end, low)
        return self._answer(bound)

    def _answer(self, bound: float) -> Answer:
        if not self.chosen:
            return Answer(chosen=(), objective=np.inf, bound=min(bound, self.objective))
        return Answer(chosen=self.chosen, objective=self.objective, bound=min(bound, self.objective))

    def _push(self, begin: int, end: int, low: float) -> None:
        if begin <= end:
            heapq.heappush(self.intervals, (self.pace * float(self.slowest_K[begin]) + low, begin, end, low))

    def _fastest(self, known: int) -> int:
        """Index of the least pace at which there is any answer; there is one at ``known``."""
        low, high = 0, known
        while low < high:
            middle = (low + high) // 2
            if self.chain.relaxed(float(self.slowest_K[middle])) is None:
                low = middle + 1
            else:
                high = middle
        return low

    def _value(self, index: int) -> tuple[float, int, float]:
        """What steady times up to a pace, at which there is an answer, can give.

        Returns:
            The least ``v``, or a lower bound of it where that proves that no answer up to this pace is of interest; the
            pace of the answer that reaches ``v``; and a bound on the objective from that pace up to this one.
        """
        slowest, floor = float(self.slowest_K[index]), float(self.slowest_K[self.floor])
        found = self.chain.relaxed(slowest)
        if found is None:
            raise AssertionError(f"no answer at pace {slowest}, but at the lower {floor}")
        low, chosen = found
        high, reached = self._note(chosen), self._reached(chosen)
        while high - low > PRECISION * high and self.pace * floor + low < self.objective:
            cap = (low + high) / 2
            better = self.chain.capped(slowest, cap)
            if better is None:
                low = cap
            else:
                high, reached = self._note(better), self._reached(better)
        return low, reached, self.pace * float(self.slowest_K[reached]) + low

    def _reached(self, chosen: tuple[int, ...]) -> int:
        return int(np.searchsorted(self.slowest_K, self.problem.steady(chosen).max()))

    def _note(self, chosen: tuple[int, ...]) -> float:
        """Remember an answer if it is the best; returns its ``v``."""
        objective = self.problem.objective(chosen)
        if objective < self.objective:
            self.objective, self.chosen = objective, chosen
        return objective - self.pace * float(self.problem.steady(chosen).max())


def least_peak(problem: InterStageProblem) -> tuple[float, tuple[int, ...]] | None:
    """Choices whose largest steady "time" is least; used with peak bytes in place of seconds.

    Returns:
        The value and the choices, or ``None`` if the problem has no answer.
    """
    if any(not len(slot) for slot in problem.slots):
        return None
    if len(problem.slots) == 1:
        answer = _solve_single(problem)
        return (float(problem.steady(answer.chosen)[0]), answer.chosen) if answer.chosen else None
    chain = _Chain(problem)
    values_K = np.unique(np.concatenate([slot.steady_K for slot in problem.slots]))
    return _bisect(values_K, chain.relaxed)


def _bisect(
    values_K: FloatArray, attempt: Callable[[float], tuple[float, tuple[int, ...]] | None]
) -> tuple[float, tuple[int, ...]] | None:
    low, high, best = 0, len(values_K), None
    while low < high:
        middle = (low + high) // 2
        found = attempt(float(values_K[middle]))
        if found is None:
            low = middle + 1
        else:
            high, best = middle, (float(values_K[middle]), found[1])
    return best
