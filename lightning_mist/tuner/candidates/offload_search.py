"""The choices of stages, with and without part of their state in host memory.

Copies add to the steady time and never take from it. Of the boundary time they can hide giving out parameters, which
is then beside a forward and its updates; averaging gradients takes no less beside a backward that takes longer, both
together, but where a machine's corrections multiply one of them. So whatever a candidate offloads, it takes at least
its own ``t`` resident, and its ``t + d`` is at least ``t`` with the rest of ``d`` (:attr:`Table.floor_K`). Where a
choice that fits
resident dominates both, no ratio is tried. Of all others every combination of ratios is looked at, its bytes first
(:mod:`lightning_mist.tuner.candidates.offload_feasible`); the seconds of those that fit and offload no more than they
have to are worked out, and what is not dominated is a choice.

Array axes
    K  candidates of a table
    P  candidates of a table as stages may have them
    B  those that are tried with offload
    I  those that fit resident and are not dominated
    J  choices: those, and candidates with ratios
    U  distinct candidates with ratios, whatever the stage
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import thread_time

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates
from lightning_mist.cost.batched_stages import seconds_of_stages
from lightning_mist.cost.inputs import FloatArray, IntArray, OffloadCandidates, Placed, distinct
from lightning_mist.plan import OFFLOADED
from lightning_mist.tuner.candidates.candidate_tables import ROOM, Table
from lightning_mist.tuner.candidates.choices import SlotChoices
from lightning_mist.tuner.candidates.offload_feasible import Feasible, feasible
from lightning_mist.tuner.candidates.offload_ratios import RatioGrid
from lightning_mist.tuner.candidates.pareto import non_dominated, not_beaten
from lightning_mist.tuner.candidates.stage_points import Stage, StagePoints

TIE = 1 + 1e-13
"""Offloaded candidates count as slower by this, which no tolerance sees: of equally fast ones the resident one wins."""

SECONDS_AT_ONCE = 1 << 13
"""Candidates with ratios whose seconds are worked out together: each takes 5 KB meanwhile."""


class TimeIsUpError(Exception):
    """The search's time was over before all candidates were evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSearch:
    """Finds the choices of stages that share tables.

    Attributes:
        memory_limit: Bytes that a device may use.
        host_limit: Bytes of host memory that it may use.
        deadline: Value of ``thread_time()`` at which to stop.
    """

    model: CostModel
    grid: RatioGrid
    memory_limit: float
    host_limit: float
    deadline: float = np.inf

    def frontiers(
        self, asked: Sequence[tuple[Table, Sequence[Stage]]], slowest: float
    ) -> tuple[list[list[SlotChoices]], int]:
        """What each stage of every table may be that is not dominated, and how many candidates were tried offloaded.

        Args:
            asked: The tables, and the stages that share each.
            slowest: The most steady seconds, without what the stages behind cost.

        Raises:
            TimeIsUpError: If there is no time left to evaluate them.
        """
        every = [ResidentPoints.of(table, stages, slowest, self.memory_limit) for table, stages in asked]
        found, tried = [], 0
        for item in every:
            blocks = [Feasible.none()]
            if len(self.grid) > 1:
                point_B = item.worth_offloading()
                tried += len(distinct(item.points.index_P[point_B])) * (len(self.grid) - 1)
                for block in feasible(self.model, self.grid, item.points, point_B, self._limits, slowest):
                    self._check_time()
                    blocks.append(block)
            some = Feasible.joined(blocks)
            found.append(some.take(np.lexsort((some.combination_J, some.point_J))))
        seconds = self._seconds([(item.points, some) for item, some in zip(every, found, strict=True)])
        return [self._choices(*item, slowest) for item in zip(every, found, seconds, strict=True)], tried

    @property
    def _limits(self) -> tuple[float, float]:
        return self.memory_limit, self.host_limit

    def _check_time(self) -> None:
        if thread_time() > self.deadline:
            raise TimeIsUpError

    def _seconds(self, found: Sequence[tuple[StagePoints, Feasible]]) -> list[tuple[FloatArray, FloatArray]]:
        """Steady and boundary seconds of candidates with ratios of every table, without what stages behind add."""
        placed: list[Placed] = []
        every: list[tuple[IntArray, list[IntArray]]] = []
        for points, item in found:
            code_J = points.index_P[item.point_J] * len(self.grid) + item.combination_J
            code_U, of_J = np.unique(code_J, return_inverse=True)
            index_U, combination_U = np.divmod(code_U, len(self.grid))
            shape_U, places = points.table.shape_K[index_U], []
            for shape in distinct(shape_U).tolist():
                of_shape_U = np.flatnonzero(shape_U == shape)
                for begin in range(0, len(of_shape_U), SECONDS_AT_ONCE):
                    at_U = of_shape_U[begin : begin + SECONDS_AT_ONCE]
                    offload_UO = self.grid.offload_CO[combination_U[at_U]]
                    candidates = _with(points.table.candidates(index_U[at_U]), offload_UO)
                    placed.append((points.table.slots[shape], candidates))
                    places.append(at_U)
            every.append((of_J, places))
        answers, result = self._answers(placed), []
        for of_J, places in every:
            seconds_XU = np.empty((2, sum(map(len, places))))
            for at_U in places:
                seconds_XU[:, at_U] = next(answers)
            result.append((seconds_XU[0, of_J], seconds_XU[1, of_J]))
        return result

    def _answers(self, placed: Sequence[Placed]) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Steady and boundary seconds of each, of some together as long as these are not too many."""
        block: list[Placed] = []
        for item, after in zip(placed, (*placed[1:], None), strict=True):
            block.append(item)
            count = sum(len(candidates) for _, candidates in block)
            if after is None or count + len(after[1]) > SECONDS_AT_ONCE:
                self._check_time()
                for answer in seconds_of_stages(self.model, block):
                    yield answer.steady_K * TIE, answer.boundary_K
                block = []

    def _choices(
        self,
        resident: "ResidentPoints",
        offloaded: Feasible,
        seconds: tuple[FloatArray, FloatArray],
        slowest: float,
    ) -> list[SlotChoices]:
        """What each stage of a table may be that is not dominated, resident or offloaded."""
        points, point_I = resident.points, resident.point_I
        fast_J = np.flatnonzero(seconds[0] <= slowest * ROOM)
        more_J = offloaded.point_J[fast_J]
        point_J = np.concatenate([point_I, more_J])
        steady_J = np.concatenate([points.steady_P[point_I], seconds[0][fast_J] + points.later_P[more_J]])
        boundary_J = np.concatenate([points.table.boundary_K[points.index_P[point_I]], seconds[1][fast_J]])
        peak_J = np.concatenate([resident.peak_P[point_I], offloaded.peak_J[fast_J]])
        offload_JO = np.zeros((len(point_J), len(OFFLOADED)))
        offload_JO[len(point_I) :] = self.grid.offload_CO[offloaded.combination_J[fast_J]]
        best_J = non_dominated(points.group_P[point_J], steady_J, steady_J + boundary_J)
        return _by_stage(
            points, point_J[best_J], peak_J[best_J], (steady_J[best_J], boundary_J[best_J]), offload_JO[best_J]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPoints:
    """What the stages that share a table may be without offload.

    Attributes:
        peak_P: Peak bytes.
        point_I: Those that fit and are not dominated, stage after stage.
    """

    points: StagePoints
    peak_P: FloatArray
    point_I: IntArray

    @classmethod
    def of(cls, table: Table, stages: Sequence[Stage], slowest: float, limit: float) -> "ResidentPoints":
        """What stages may be in at most so many seconds and bytes."""
        points = StagePoints.of(table, stages, slowest)
        peak_P = points.peaks()
        fits_J = np.flatnonzero(peak_P <= limit)
        best_J = non_dominated(points.group_P[fits_J], points.steady_P[fits_J], points.whole_P[fits_J])
        return cls(points=points, peak_P=peak_P, point_I=fits_J[best_J])

    def worth_offloading(self) -> IntArray:
        """Which candidates could beat those that fit resident if they offloaded something."""
        points, point_I = self.points, self.point_I
        others = points.group_P[point_I], points.steady_P[point_I], points.whole_P[point_I]
        point_B: IntArray = np.flatnonzero(not_beaten(points.group_P, points.steady_P, points.floor_P, others))
        return point_B


def _by_stage(
    points: StagePoints,
    point_J: IntArray,
    peak_J: FloatArray,
    seconds: tuple[FloatArray, FloatArray],
    offload_JO: FloatArray,
) -> list[SlotChoices]:
    """Candidates, which come stage after stage, as choices of each stage."""
    table = points.table
    index_J = points.index_P[point_J]
    choices = table.choices(index_J, peak_J, seconds, offload_JO)
    # A candidate is as many choices as there are places where its layer range occurs.
    ends_J = np.cumsum(np.concatenate([[0], table.ranges.count_W[table.range_K[index_J]]]))
    bounds = ends_J[[0, *points.ends(point_J)]].tolist()
    return [choices.take(slice(begin, end)) for begin, end in pairwise(bounds)]


def _with(candidates: StageCandidates, offload_KO: FloatArray) -> StageCandidates:
    ratios = {f"{name}_K": offload_KO[:, place] for place, name in enumerate(OFFLOADED)}
    return replace(candidates, offload=OffloadCandidates(**ratios))
