"""What a stage may be without offload, to which is added what it may move.

Array axes
    K  candidates of a table
    J  candidates
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.choices import SlotChoices
from lightning_mist.tuner.moved import Asked, Mover
from lightning_mist.tuner.moved_known import Moved, Situations
from lightning_mist.tuner.pareto import non_dominated
from lightning_mist.tuner.search_space import OFFLOADED
from lightning_mist.tuner.tables import ROOM, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmoved:
    """What one stage may be without offload.

    Attributes:
        table: What stages of its role share.
        counted: The same with what the stages behind this one cost.
        peak_K: Peak bytes of the first candidates of the table.
        kept_J: Those that fit and are not dominated.
        asked: Those that could be better if they moved something; nothing if nothing may be moved.
    """

    table: Table
    counted: Table
    peak_K: FloatArray
    kept_J: IntArray
    asked: Asked | None

    def alone(self) -> SlotChoices:
        """What it may be that is not dominated, without offload."""
        return self.counted.choices(self.kept_J, self.peak_K[self.kept_J])

    def frontier(self, moved: Moved) -> SlotChoices:
        """What it may be that is not dominated, with and without offload."""
        table, counted, kept_J = self.table, self.counted, self.kept_J
        steady_J, boundary_J, peak_J, index_J = (
            np.concatenate([here[kept_J], there])
            for here, there in (
                (counted.steady_K, moved.steady_J + (counted.steady_K - table.steady_K)[moved.index_J]),
                (table.boundary_K, moved.boundary_J),
                (self.peak_K, moved.peak_J),
                (np.arange(len(self.peak_K)), moved.index_J),
            )
        )
        best_J = non_dominated(table.place_K[index_J], steady_J, steady_J + boundary_J)
        offload_JO = np.concatenate([np.zeros((len(kept_J), len(OFFLOADED))), moved.offload_JO])
        seconds = steady_J[best_J], boundary_J[best_J]
        return table.choices(index_J[best_J], peak_J[best_J], seconds, offload_JO[best_J])


def unmoved(
    mover: Mover,
    tables: tuple[Table, Table],
    phases: Situations,
    slowest: float,
    ahead: Sequence[Situations] = (),
    among_NL: BoolArray | None = None,
    weight: int | None = None,
) -> Unmoved:
    """What fits of one stage without offload, and what may be better with it.

    Args:
        mover: Evaluates what may be moved.
        tables: What stages of its role share; the same with what the stages behind this one cost.
        phases: Its situations.
        slowest: The most steady seconds.
        ahead: Situations of stages that will be asked about next.
        among_NL: Of which numbers of devices and layers state may be moved.
        weight: If only the least seconds of a batch count, the number of microbatches but one.
    """
    table, counted = tables
    count = int(np.searchsorted(table.steady_K, slowest, side="right"))

    def fitting(priced: Table, situations: Situations) -> tuple[FloatArray, IntArray]:
        peak_K = priced.parts.take(slice(count)).peaks(situations)
        return peak_K, priced.order.frontier(peak_K <= mover.memory_limit)

    def worth(priced: Table, kept_J: IntArray) -> IntArray:
        found_J = worth_moving(priced, count, kept_J)
        if weight is not None:
            fits_J = weight * priced.steady_K[kept_J] + (priced.steady_K + priced.boundary_K)[kept_J]
            least_J = weight * priced.steady_K[found_J] + priced.floor_K[found_J]
            found_J = found_J[least_J <= fits_J.min(initial=np.inf) * ROOM]
        return found_J if among_NL is None else found_J[priced.is_among(among_NL, found_J)]

    peak_K, kept_J = fitting(counted, phases)
    asked = None
    if len(mover.ratios) > 1:
        later = () if mover.has_looked(table, phases) else ahead
        asked = Asked(
            table=table,
            counted=counted,
            index_B=worth(counted, kept_J),
            kept_I=kept_J,
            slowest=slowest,
            phases=phases,
            ahead=tuple((worth(table, fitting(table, item)[1]), item) for item in later),
            weight=weight,
        )
    return Unmoved(table=table, counted=counted, peak_K=peak_K, kept_J=kept_J, asked=asked)


def worth_moving(table: Table, count: int, kept_J: IntArray) -> IntArray:
    """Which candidates could beat those that fit if they moved something.

    Args:
        table: The candidates.
        count: How many of the first are asked about.
        kept_J: Those that fit and are not dominated.
    """
    index_J = np.concatenate([kept_J, np.arange(count)])
    fits_J = np.arange(len(index_J)) < len(kept_J)
    steady_J, place_J = table.steady_K[index_J], table.place_K[index_J]
    whole_J = np.where(fits_J, steady_J + table.boundary_K[index_J], table.floor_K[index_J])
    # By place, in each by rising steady time, in each of these what fits first.
    order = np.lexsort((~fits_J, steady_J, place_J))
    beats_J = np.where(fits_J, whole_J, np.inf)[order]
    values, rank_J = np.unique(beats_J, return_inverse=True)
    _, group_J = np.unique(place_J[order], return_inverse=True)
    # Ranks fall from place to place, so that the running minimum begins anew in each.
    least_J = np.minimum.accumulate(rank_J.reshape(-1) - group_J.reshape(-1) * (len(values) + 1))
    least_whole_J = values[least_J + group_J.reshape(-1) * (len(values) + 1)] if count else beats_J
    found: IntArray = np.sort(index_J[order][~fits_J[order] & (whole_J[order] < least_whole_J)])
    return found
