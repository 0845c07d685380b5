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
    U  distinct candidates with ratios, whatever the stage and its neighbours
    X  steady and boundary seconds
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Hashable, Iterator, Sequence
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
        none_B = np.empty(0, dtype=np.int64)
        tried = [(item.points, item.worth_offloading() if len(self.grid) > 1 else none_B) for item in every]
        blocks = [[Feasible.none()] for _ in every]
        for number, block in feasible(self.model, self.grid, tried, (self.memory_limit, self.host_limit), slowest):
            self._check_time()
            blocks[number].append(block)
        found = [item.take(np.lexsort((item.combination_J, item.point_J))) for item in map(Feasible.joined, blocks)]
        count = sum(len(distinct(points.index_P[point_B])) for points, point_B in tried) * (len(self.grid) - 1)
        seconds = self._seconds([(item.points, some) for item, some in zip(every, found, strict=True)])
        return [self._choices(*item, slowest) for item in zip(every, found, seconds, strict=True)], count

    def _check_time(self) -> None:
        if thread_time() > self.deadline:
            raise TimeIsUpError

    def _seconds(self, found: Sequence[tuple[StagePoints, Feasible]]) -> list[FloatArray]:
        """Steady and boundary seconds of candidates with ratios of every table, without what stages behind add."""
        alike: dict[Hashable, list[tuple[int, IntArray]]] = {}
        for number, (points, item) in enumerate(found):
            table, shape_J = points.table, points.table.shape_K[points.index_P[item.point_J]]
            for shape in distinct(shape_J).tolist():
                slot = replace(table.slots[shape], stage_index=0, num_stages=min(2, table.slots[shape].num_stages))
                # Wherever the neighbours of a stage are, it takes as long but for what is exchanged with them.
                key = id(table.ranges), replace(slot, parts=())
                alike.setdefault(key, []).append((number, np.flatnonzero(shape_J == shape)))
        placed: list[Placed] = []
        distinct_U: list[IntArray] = []
        for places in alike.values():
            more, of_J = self._distinct([(found[number][0], found[number][1].take(at_J)) for number, at_J in places])
            placed += more
            distinct_U.append(of_J)
        answers, seconds = self._answers(placed), [np.empty((2, len(item))) for _, item in found]
        for of_J, places in zip(distinct_U, alike.values(), strict=True):
            count, blocks = int(of_J.max(initial=-1)) + 1, list[FloatArray]()
            while sum(block.shape[1] for block in blocks) < count:
                blocks.append(next(answers))
            alone_XJ, begin = np.concatenate(blocks, axis=1)[:, of_J], 0
            for number, at_J in places:
                points, item = found[number]
                exchanged_XJ = points.table.exchanged_XK[:, points.index_P[item.point_J[at_J]]]
                seconds[number][:, at_J] = alone_XJ[:, begin : begin + len(at_J)] + exchanged_XJ
                seconds[number][0, at_J] *= TIE
                begin += len(at_J)
        return seconds

    def _distinct(self, some: Sequence[tuple[StagePoints, Feasible]]) -> tuple[list[Placed], IntArray]:
        """The distinct ones of candidates with ratios on one arrangement of devices, and which of them each is."""
        index = [points.index_P[item.point_J] for points, item in some]
        codes = [
            points.table.codes(index_J) * len(self.grid) + item.combination_J
            for index_J, (points, item) in zip(index, some, strict=True)
        ]
        _, first_U, of_J = np.unique(np.concatenate(codes), return_index=True, return_inverse=True)
        every = [points.table.candidates(index_J) for index_J, (points, _) in zip(index, some, strict=True)]
        offload_JO = self.grid.offload_CO[np.concatenate([item.combination_J for _, item in some])]
        table, candidates = some[0][0].table, _with(StageCandidates.joined(every).take(first_U), offload_JO[first_U])
        slot, blocks = table.slots[int(table.shape_K[index[0][0]])], range(0, len(first_U), SECONDS_AT_ONCE)
        return [(slot, candidates.take(slice(begin, begin + SECONDS_AT_ONCE))) for begin in blocks], of_J

    def _answers(self, placed: Sequence[Placed]) -> Iterator[FloatArray]:
        """Steady and boundary seconds of each but for exchange, of some together as long as these are not too many."""
        block: list[Placed] = []
        for item, after in zip(placed, (*placed[1:], None), strict=True):
            block.append(item)
            count = sum(len(candidates) for _, candidates in block)
            if after is None or count + len(after[1]) > SECONDS_AT_ONCE:
                self._check_time()
                for answer in seconds_of_stages(self.model, block):
                    yield np.stack([answer.steady_K - answer.transfer_K, answer.boundary_K - answer.tied_K])
                block = []

    def _choices(
        self,
        resident: "ResidentPoints",
        offloaded: Feasible,
        seconds: FloatArray,
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
