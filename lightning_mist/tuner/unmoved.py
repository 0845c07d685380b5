"""What stages may be without offload, to which is added what they may move.

Array axes
    K  candidates of a table
    P  candidates of a table as stages may have them
    J  some of these
    Q  stages
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.tuner.choices import SlotChoices
from lightning_mist.tuner.moved_known import Moved
from lightning_mist.tuner.offload_search import Asked, Mover
from lightning_mist.tuner.pareto import non_dominated, not_beaten
from lightning_mist.tuner.search_space import OFFLOADED
from lightning_mist.tuner.stage_points import Stage, StagePoints
from lightning_mist.tuner.tables import ROOM, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmoved:
    """What the stages that share a table may be without offload.

    Attributes:
        points: All that they may be.
        peak_P: Peak bytes.
        kept_J: Those that fit and are not dominated, stage after stage.
        asked: Those that could be better if they moved something; nothing if nothing may be moved.
    """

    points: StagePoints
    peak_P: FloatArray
    kept_J: IntArray
    asked: Asked | None

    def alone(self) -> list[SlotChoices]:
        """What each may be that is not dominated, without offload."""
        points, kept_J = self.points, self.kept_J
        seconds = points.steady_P[kept_J], points.table.boundary_K[points.index_P[kept_J]]
        return self._by_stage(kept_J, self.peak_P[kept_J], seconds, np.zeros((len(kept_J), len(OFFLOADED))))

    def frontiers(self, moved: Moved) -> list[SlotChoices]:
        """What each may be that is not dominated, with and without offload."""
        points, kept_J = self.points, self.kept_J
        of_J = np.concatenate([kept_J, moved.point_J])
        steady_J = np.concatenate([points.steady_P[kept_J], moved.steady_J + points.later_P[moved.point_J]])
        boundary_J = np.concatenate([points.table.boundary_K[points.index_P[kept_J]], moved.boundary_J])
        peak_J = np.concatenate([self.peak_P[kept_J], moved.peak_J])
        best_J = non_dominated(points.group_P[of_J], steady_J, steady_J + boundary_J)
        offload_JO = np.concatenate([np.zeros((len(kept_J), len(OFFLOADED))), moved.offload_JO])[best_J]
        return self._by_stage(of_J[best_J], peak_J[best_J], (steady_J[best_J], boundary_J[best_J]), offload_JO)

    def _by_stage(
        self, point_J: IntArray, peak_J: FloatArray, seconds: tuple[FloatArray, FloatArray], offload_JO: FloatArray
    ) -> list[SlotChoices]:
        """Candidates, which come stage after stage, as choices of each stage."""
        points, table = self.points, self.points.table
        index_J = points.index_P[point_J]
        choices = table.choices(index_J, peak_J, seconds, offload_JO)
        # A candidate is as many choices as there are places where its run of layers occurs.
        ends_J = np.cumsum(np.concatenate([[0], table.windows.count_W[table.window_K[index_J]]]))
        first_Q = np.searchsorted(points.stage_P[point_J], np.arange(len(points.stages) + 1))
        bounds = ends_J[first_Q].tolist()
        return [choices.take(slice(begin, end)) for begin, end in pairwise(bounds)]


def unmoved(
    mover: Mover,
    table: Table,
    stages: Sequence[Stage],
    slowest: float,
    *,
    ahead: Sequence[Stage] = (),
    weight: int | None = None,
) -> Unmoved:
    """What fits of stages without offload, and what may be better with it.

    Args:
        mover: Evaluates what may be moved.
        table: What the stages share.
        stages: The stages.
        slowest: The most steady seconds.
        ahead: Stages that will be asked about next.
        weight: If only the least seconds of a batch count, the number of microbatches but one.
    """
    points = StagePoints.of(table, stages, slowest)
    peak_P = points.peaks()
    kept_J = _fitting(points, peak_P, mover.memory_limit)
    asked = None
    if len(mover.ratios) > 1:
        later = StagePoints.of(table, ahead, slowest)
        later_J = worth_moving(later, _fitting(later, later.peaks(), mover.memory_limit)) if ahead else later.index_P
        asked = Asked(
            points=points,
            point_B=worth_moving(points, kept_J, weight),
            kept_I=kept_J,
            slowest=slowest,
            ahead=later.index_P[later_J],
            situations=frozenset(stage.phases for stage in (*stages, *ahead)),
            weight=weight,
        )
    return Unmoved(points=points, peak_P=peak_P, kept_J=kept_J, asked=asked)


def _fitting(points: StagePoints, peak_P: FloatArray, limit: float) -> IntArray:
    """Those that fit and are not dominated, stage after stage."""
    fits_J = np.flatnonzero(peak_P <= limit)
    kept_J = non_dominated(points.group_P[fits_J], points.steady_P[fits_J], points.whole_P[fits_J])
    found_J: IntArray = fits_J[kept_J]
    return found_J


def worth_moving(points: StagePoints, kept_J: IntArray, weight: int | None = None) -> IntArray:
    """Which candidates of stages could beat those that fit if they moved something.

    Args:
        points: The candidates.
        kept_J: Those that fit and are not dominated.
        weight: If only the least seconds of a batch count, the number of microbatches but one.
    """
    others = points.group_P[kept_J], points.steady_P[kept_J], points.whole_P[kept_J]
    found_J: IntArray = np.flatnonzero(not_beaten(points.group_P, points.steady_P, points.floor_P, others))
    if weight is None:
        return found_J
    least_Q = np.full(len(points.stages), np.inf)
    np.minimum.at(least_Q, points.stage_P[kept_J], weight * points.steady_P[kept_J] + points.whole_P[kept_J])
    least_J = weight * points.steady_P[found_J] + points.floor_P[found_J]
    return found_J[least_J <= least_Q[points.stage_P[found_J]] * ROOM]
