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
    U  devices of every part used by a suffix of the stages, in units of their greatest common divisors; several axes
       if there are several parts
    K  choices of a slot
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.tuner.intra_stage import ANYWHERE, EVERY_PART, SlotChoices
from lightning_mist.tuner.problem import Answer, InterStageProblem
from lightning_mist.tuner.space import common_unit

PRECISION = 1e-9
"""Relative difference of objectives below which two answers count as equal, far below what costs are known to."""

_NONE = Answer(chosen=(), objective=np.inf, bound=np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """The choices of one slot with one number of devices of one part and of layers; infinite where there is none.

    Attributes:
        part: Part of the cluster.
        units: Devices, in units.
        layers: Layers.
        first: Smallest A that has a choice.
        steady_QA: Steady seconds, from ``first`` on.
        boundary_QA: Boundary seconds.
        index_QA: Index of the choice in its slot.
        least: The smallest steady time.
        most: The largest, infinite if a choice is missing.
    """

    part: int
    units: int
    layers: int
    first: int
    steady_QA: FloatArray
    boundary_QA: FloatArray
    index_QA: IntArray
    least: float
    most: float


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
    best = _least_of_single(problem, problem.num_microbatches * slot.steady_K + np.maximum(slot.boundary_K, 0.0))
    if best is None:
        return _NONE
    objective = problem.objective((best,))
    return Answer(chosen=(best,), objective=objective, bound=objective)


def _least_of_single(problem: InterStageProblem, value_K: FloatArray) -> int | None:
    """The choice of a single stage with the least value."""
    slot = problem.slots[0]
    fits_K = (slot.layers_K == problem.num_layers) & (slot.devices_K == sum(problem.num_devices))
    fits_K &= slot.part_K == (0 if len(problem.num_devices) == 1 else EVERY_PART)
    best = int(np.where(fits_K, value_K, np.inf).argmin())
    return best if fits_K[best] else None


class _Chain:
    """The stages of a problem as bands, and the passes over them."""

    def __init__(self, problem: InterStageProblem) -> None:
        self.problem = problem
        self.width = problem.num_layers - len(problem.slots) + 1
        parts = range(len(problem.num_devices))
        counts = [
            {int(n) for slot in problem.slots for n in np.unique(slot.devices_K[slot.part_K == p])} for p in parts
        ]
        self.unit = [common_unit([*counts[p], problem.num_devices[p]]) for p in parts]
        self.units = tuple(total // unit for total, unit in zip(problem.num_devices, self.unit, strict=True))
        # More than the choices of any band, so that band and choice make one number.
        self._depth = 1 + max(len(slot) for slot in problem.slots)
        self.bands = [self._bands(index, slot) for index, slot in enumerate(problem.slots)]

    def _bands(self, stage: int, slot: SlotChoices) -> list[_Band]:
        order_K = np.lexsort((slot.steady_K, slot.start_K, slot.layers_K, slot.devices_K, slot.part_K))
        kinds_K = np.stack([slot.part_K, slot.devices_K, slot.layers_K])[:, order_K]
        edges = np.flatnonzero((np.diff(kinds_K, axis=1) != 0).any(axis=0)) + 1
        found = []
        for index_K in np.split(order_K, edges):
            part, devices, layers = (int(values[index_K[0]]) for values in (slot.part_K, slot.devices_K, slot.layers_K))
            if part != EVERY_PART and devices <= self.problem.num_devices[part] and layers <= self.width:
                band = self._band(stage, slot, index_K, part, layers)
                found += [] if band is None else [band]
        return found

    def _band(self, stage: int, slot: SlotChoices, index_K: IntArray, part: int, layers: int) -> _Band | None:
        """Stage ``i`` starts at layer ``i + a`` and ends before ``i + a + layers``, which is ``i + 1 + e``.

        The choices come by rising start, and of one start by rising steady time.
        """
        places = self.width - layers + 1
        if (slot.start_K[index_K] == ANYWHERE).all():
            index_QA = np.repeat(index_K[:, None], 1 if stage == 0 else places, axis=1)
            first = 0
        else:
            place_K = slot.start_K[index_K] - stage
            inside = (place_K >= 0) & (place_K < places)
            if not inside.any():
                return None
            place_K, index_K = place_K[inside], index_K[inside]
            first = int(place_K[0])
            # Choices with the same start keep their order, by rising steady time.
            rank = np.arange(len(place_K)) - np.searchsorted(place_K, place_K)
            index_QA = np.full((int(rank.max()) + 1, int(place_K[-1]) - first + 1), -1, dtype=np.int64)
            index_QA[rank, place_K - first] = index_K
        steady_QA = np.where(index_QA >= 0, slot.steady_K[index_QA], np.inf)
        return _Band(
            part=part,
            units=int(slot.devices_K[index_K[0]]) // self.unit[part],
            layers=layers,
            first=first,
            steady_QA=steady_QA,
            boundary_QA=np.where(index_QA >= 0, slot.boundary_K[index_QA], 0.0),
            index_QA=index_QA,
            least=float(steady_QA.min()),
            most=float(steady_QA.max()),
        )

    def relaxed(self, slowest: float) -> tuple[float, tuple[int, ...]] | None:
        """The least ``sum t + max(0, d_0)`` with every steady time at most ``slowest``, and choices that reach it."""
        return self._walk(slowest, None)

    def capped(self, slowest: float, cap: float) -> tuple[int, ...] | None:
        """Choices with every steady time at most ``slowest`` and ``sum t + D`` at most ``cap``, if there are any."""
        found = self._walk(slowest, cap)
        return None if found is None or found[0] > cap else found[1]

    def _walk(self, slowest: float, cap: float | None) -> tuple[float, tuple[int, ...]] | None:
        """From the last stage to the first: the least suffix sums, with every ``suffix sum + d`` at most ``cap``."""
        shape = (self.width, *(units + 1 for units in self.units))
        suffix_EU = np.full(shape, np.inf)
        suffix_EU[-1].flat[0] = 0.0
        steps: list[IntArray] = []
        for stage in range(len(self.bands) - 1, -1, -1):
            best_AU = np.full(shape, np.inf)
            # Which band and which of its choices, as one number.
            code_AU = np.full(shape, -1, dtype=np.int64)
            for number, band in enumerate(self.bands[stage]):
                if band.least <= slowest:
                    self._extend(stage == 0, number, band, (suffix_EU, best_AU, code_AU), slowest, cap)
            steps.append(code_AU)
            suffix_EU = best_AU
        value = float(suffix_EU[0].flat[-1])
        return (value, self._trace(steps[::-1])) if np.isfinite(value) else None

    def _extend(
        self,
        is_first: bool,
        number: int,
        band: _Band,
        state: tuple[FloatArray, FloatArray, IntArray],
        slowest: float,
        cap: float | None,
    ) -> None:
        """Put one band of a stage in front of all suffixes; improves the best sums and their codes in place."""
        suffix_EU, best_AU, code_AU = state
        count, end = band.steady_QA.shape[1], band.first + band.layers - 1
        others = (slice(None),) * band.part
        after = (slice(band.first, band.first + count), *others, slice(band.units, None))
        before = (slice(end, end + count), *others, slice(self.units[band.part] + 1 - band.units))
        suffix_EU, best_AU, code_AU = suffix_EU[before], best_AU[after], code_AU[after]
        column = (count, *(1 for _ in self.units))
        for choice in range(len(band.steady_QA)):
            steady_A1 = band.steady_QA[choice].reshape(column)
            if band.most > slowest:
                steady_A1 = np.where(steady_A1 <= slowest, steady_A1, np.inf)
            sum_AU = steady_A1 + suffix_EU
            if cap is not None:
                sum_AU[sum_AU + band.boundary_QA[choice].reshape(column) > cap] = np.inf
            elif is_first:
                sum_AU += np.maximum(band.boundary_QA[choice], 0.0).reshape(column)
            better_AU = sum_AU < best_AU
            np.copyto(best_AU, sum_AU, where=better_AU)
            np.copyto(code_AU, number * self._depth + choice, where=better_AU)
            if cap is None and not is_first:
                return  # Choices come by rising steady time, and nothing else counts here.

    def _trace(self, steps: list[IntArray]) -> tuple[int, ...]:
        place, units, chosen = 0, list(self.units), []
        for bands, code_AU in zip(self.bands, steps, strict=True):
            number, choice = divmod(int(code_AU[place][tuple(units)]), self._depth)
            band = bands[number]
            chosen.append(int(band.index_QA[choice, place - band.first]))
            place += band.layers - 1
            units[band.part] -= band.units
        return tuple(chosen)


class _Search:
    """Best-first search over the slowest stage's steady time."""

    def __init__(self, problem: InterStageProblem, below: float, deadline: float) -> None:
        self.problem, self.chain, self.deadline = problem, _Chain(problem), deadline
        self.slowest_K = np.unique(np.concatenate([slot.steady_K for slot in problem.slots]))
        self.pace = problem.num_microbatches - 1
        self.objective, self.chosen = below, ()  # type: tuple[float, tuple[int, ...]]
        # Bound on the objective, first and last pace, and bound on v at these paces.
        self.intervals: list[tuple[float, int, int, float]] = []

    def run(self) -> Answer:
        """The best answer below the given objective."""
        last = len(self.slowest_K) - 1
        found = self.chain.relaxed(float(self.slowest_K[last]))
        if found is None:
            return _NONE
        low, chosen = found
        self._note(chosen)
        self._push(self._fastest(low, self._reached(chosen)), last, low)
        bound = np.inf
        while self.intervals:
            bound_here, begin, end, low = heapq.heappop(self.intervals)
            if bound_here >= self.objective * (1 - PRECISION) or perf_counter() > self.deadline:
                bound = min(bound, bound_here)
                break
            middle = (begin + end) // 2
            value, reached, proven = self._value(middle, begin)
            bound = min(bound, proven)
            self._push(begin, reached - 1, value)
            self._push(middle + 1, end, low)
        return Answer(
            chosen=self.chosen,
            objective=self.objective if self.chosen else np.inf,
            bound=min(bound, self.objective),
        )

    def _push(self, begin: int, end: int, low: float) -> None:
        if begin <= end:
            heapq.heappush(self.intervals, (self.pace * float(self.slowest_K[begin]) + low, begin, end, low))

    def _fastest(self, value: float, known: int) -> int:
        """Index of the least pace that can lead to a better answer; at the pace ``known`` there is an answer.

        Stages cannot be faster than if all devices worked all the time at the best rate of any choice.
        """
        rate_bound = self.problem.least_pace()
        low, high = int(np.searchsorted(self.slowest_K, rate_bound * (1 - PRECISION))), known
        while low < high and self.pace * float(self.slowest_K[low]) + value < self.objective:
            middle = (low + high) // 2
            if self.chain.relaxed(float(self.slowest_K[middle])) is None:
                low = middle + 1
            else:
                high = middle
        return low

    def _value(self, index: int, begin: int) -> tuple[float, int, float]:
        """What steady times up to a pace can give.

        Args:
            index: The pace.
            begin: The least pace that is still of interest.

        Returns:
            The least ``v``, or a lower bound of it that proves that no pace from ``begin`` to this one is of interest;
            the pace of the answer that reaches ``v``; and a bound on the objective from that pace to this one. Without
            any answer up to this pace nothing below is of interest either: ``begin``, and infinities.
        """
        slowest, floor = float(self.slowest_K[index]), float(self.slowest_K[begin])
        found = self.chain.relaxed(slowest)
        if found is None:
            return np.inf, begin, np.inf
        low, chosen = found
        high, reached = self._note(chosen), max(begin, self._reached(chosen))
        is_best = True  # First ask whether anything beats what is there, then halve the difference, in turn.
        while high - low > PRECISION * high and self.pace * floor + low < self.objective:
            cap = high * (1 - PRECISION) if is_best else (low + high) / 2
            is_best = not is_best
            better = self.chain.capped(slowest, cap)
            if better is None:
                low = cap
            else:
                high, reached = self._note(better), max(begin, self._reached(better))
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
        best = _least_of_single(problem, problem.slots[0].steady_K)
        return None if best is None else (float(problem.slots[0].steady_K[best]), (best,))
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
