"""Candidates of a table that keep a part of their state in host memory, evaluated where they may be of use.

Copies add to the steady time and never take from it, and of the boundary time they can hide no more than averaging
gradients and giving out parameters. So whatever a candidate moves, it takes at least its own ``t`` without copies, and
its ``t + d`` is at least ``t`` with what of ``d`` is neither of these two (:attr:`Table.floor_K`). Where a choice that
fits beats both, no ratio is tried (:func:`.unmoved.worth_moving`).

Nor is one of a candidate that takes longer without copies than another is known to take with what it moves and fits.
Of all others every combination of ratios is looked at, its memory first. What it takes at least is known then too
(:mod:`lightning_mist.cost.offload_floors`), and its seconds are worked out only if by that it may be better than all
that is known to fit: those that promise most first, then what they leave.

Of those that fit, one is needed only if it moves no more than it has to. For if a ratio rises, no unit copies less: so
neither ``t`` nor ``t + d`` fall, as these are sums of larger ones of what units take with and without copies. Three
things are not compared so:

* Candidates whose update waits for the next forward, which those are that move parameters, gradients or optimizer
  state, with those whose update does not.
* Different ratios of what ZeRO deals out over ranks: with a larger ratio other parameters are moved, and the rank that
  moves most may move less than before.

* Different ratios where parameters are tied and a larger ratio moves a larger parameter of a unit instead of one that
  several units fetch. Of all others a larger ratio moves as many bytes of every unit or more: the largest that fits
  comes first, so that what a smaller ratio moves instead of it is less.

Where a machine's corrections multiply some terms and not others nothing is left out.

Array axes
    K  candidates of a table
    P  candidates of a table as stages may have them
    B  those that are tried with offload
    I  those that fit without offload and are not dominated
    C  combinations of ratios, nothing moved first
    J  candidates with ratios
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.compile import IntArray
from lightning_mist.cost.offload_parts import OffloadParts, moved_shares
from lightning_mist.tuner.moved_known import Arranged, Knowledge, Known, Moved
from lightning_mist.tuner.moved_settled import Unsettled, counted_seconds, learn_seconds, next_ones
from lightning_mist.tuner.offload_feasible import Kept, arranged, floors_of, in_blocks, kept
from lightning_mist.tuner.offload_ratios import Ratios
from lightning_mist.tuner.pareto import not_beaten
from lightning_mist.tuner.stage_points import Situations, StagePoints
from lightning_mist.tuner.tables import ROOM, Table

AT_ONCE = 1 << 14
"""Candidates that are evaluated together: enough to be fast, and few enough to take little memory."""


class TimeIsUpError(Exception):
    """The search's time was over before all candidates were evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Candidates of the stages of a table that could be better than others if they moved something.

    Attributes:
        points: The candidates of all stages.
        point_B: Which could.
        kept_I: Which fit without offload and are not dominated.
        slowest: The most steady seconds that are of use.
        ahead: Candidates of the table that will be asked about next, to count bytes together.
        situations: Those of the stages, and of stages that will be asked about next.
        weight: If only the least seconds of a batch count, the number of microbatches but one; else ``None``.
    """

    points: StagePoints
    point_B: IntArray
    kept_I: IntArray
    slowest: float
    ahead: IntArray
    situations: frozenset[Situations]
    weight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """Evaluates candidates with offload, and keeps what it has evaluated.

    Attributes:
        model: The cost model.
        ratios: What may be moved.
        memory_limit: Bytes that a device may use.
        host_limit: Bytes of host memory that it may use.
        deadline: Value of ``perf_counter()`` at which to stop.
        knowledge: What has been evaluated.
    """

    model: CostModel
    ratios: Ratios
    memory_limit: float
    host_limit: float
    deadline: float = np.inf
    knowledge: Knowledge = field(default_factory=Knowledge)

    def of(self, asked: Sequence[Asked]) -> tuple[list[Moved], int]:
        """What some candidates of stages may move, as far as it is of use, and how much has been looked at.

        Args:
            asked: The candidates of the stages of every table, each once, and what they have to be better than.

        Raises:
            TimeIsUpError: If there is no time left to evaluate them.
        """
        # What is known of a table may be forgotten for that of another; here it is still needed.
        every = [self._known(item.points.table) for item in asked]
        # What is known already may be better than all that a candidate of which nothing is known can move.
        before = [
            item.point_B[known.row_K[item.points.index_P[item.point_B]] >= 0]
            for item, known in zip(asked, every, strict=True)
        ]
        before_Q = self._kept(asked, every, before)
        new = [_may_be_better(*item) for item in zip(asked, every, before_Q, strict=True)]
        looked = self._look(asked, every, new)
        more_Q = self._kept(asked, every, new)
        found_Q = [Kept.in_order(pair, len(self.ratios)) for pair in zip(before_Q, more_Q, strict=True)]
        self._settle(
            [self._unsettled(item, known, own) for item, known, own in zip(asked, every, found_Q, strict=True)]
        )
        count, found = len(self.ratios), []
        for item, known, own in zip(asked, every, found_Q, strict=True):
            steady_J, boundary_J = known.seconds(own.place_J)
            fast_J = np.flatnonzero(steady_J <= item.points.table.pace * ROOM)
            found.append(
                Moved(
                    point_J=own.point_J[fast_J],
                    offload_JO=self.ratios.offload_CO[own.place_J[fast_J] % count],
                    steady_J=steady_J[fast_J],
                    boundary_J=boundary_J[fast_J],
                    peak_J=own.peak_J[fast_J],
                )
            )
        return found, looked * (count - 1)

    def _kept(self, asked: Sequence[Asked], every: Sequence[Known], points: Sequence[IntArray]) -> list[Kept]:
        """What some candidates of the stages of every table may move that fits, and no more than they have to."""
        wanted = [
            (known, self._arranged(known), item.points, point_B)
            for item, known, point_B in zip(asked, every, points, strict=True)
        ]
        return kept(wanted, self.ratios, (self.memory_limit, self.host_limit))

    def _look(self, asked: Sequence[Asked], every: Sequence[Known], new: Sequence[IntArray]) -> int:
        """Learn the bytes of candidates of which nothing is known; how many these are."""
        alike: dict[Hashable, list[tuple[Known, IntArray]]] = {}
        for item, known, point_B in zip(asked, every, new, strict=True):
            known.looked |= item.situations
            every_B = np.unique(np.concatenate([item.points.index_P[point_B], item.ahead]))
            new_B = every_B[known.row_K[every_B] < 0]
            shape_B = known.table.shape_K[new_B]
            for shape in np.unique(shape_B).tolist():
                alike.setdefault(_bytes_key(known.table.slots[shape]), []).append((known, new_B[shape_B == shape]))
        for some in alike.values():
            for block in in_blocks([index_B for _, index_B in some], max(1, AT_ONCE // self.ratios.pairs)):
                if perf_counter() > self.deadline:
                    raise TimeIsUpError
                self._learn_bytes([(some[place][0], index_B) for place, index_B in block])
        return sum(len(index_B) for some in alike.values() for _, index_B in some)

    def _unsettled(self, asked: Asked, known: Known, found: Kept) -> Unsettled:
        """Candidates with ratios that fit and may be better than what is known to fit."""
        points, index_I, point_J, place_J = asked.points, asked.kept_I, found.point_J, found.place_J
        steady_J, once_J = known.seconds(place_J)
        is_new_J = np.isnan(steady_J)
        of_D = point_J[~is_new_J]
        steady_D = steady_J[~is_new_J] + points.later_P[of_D]
        fitting = (
            np.concatenate([points.group_P[index_I], points.group_P[of_D]]),
            np.concatenate([points.steady_P[index_I], steady_D]),
            np.concatenate([points.whole_P[index_I], steady_D + once_J[~is_new_J]]),
        )
        # What one takes without copies may be too much already, whatever it moves.
        is_open_P = np.zeros(len(points), dtype=bool)
        is_open_P[point_J[is_new_J]] = True
        open_B = np.flatnonzero(is_open_P)
        least = counted_seconds(points.steady_P[open_B] / ROOM, points.floor_P[open_B] / ROOM, asked.weight)
        fits = fitting[0], *counted_seconds(*fitting[1:], asked.weight)
        is_open_P[open_B] = not_beaten(points.group_P[open_B], *least, fits)
        open_J = np.flatnonzero(is_new_J & is_open_P[point_J])
        point_J, place_J = point_J[open_J], place_J[open_J]
        more_J, later_J = floors_of(known, self._arranged(known), self.ratios, points.index_P[point_J], place_J)
        steady_J = (points.steady_P[point_J] + more_J) / ROOM
        return Unsettled.of(
            known,
            place_J,
            (points.group_P[point_J], steady_J, (points.floor_P[point_J] + later_J) / ROOM),
            fitting,
            later_J=points.later_P[point_J],
            open_J=np.flatnonzero(steady_J <= asked.slowest * ROOM),
            weight=asked.weight,
        )

    def _settle(self, every: Sequence[Unsettled]) -> None:
        """Evaluate whatever may be better than what is known to fit, of all stages the most promising first."""
        while unsettled := [item for item in every if item.narrow()]:
            if perf_counter() > self.deadline:
                raise TimeIsUpError
            learn_seconds(self.model, self.ratios, next_ones(unsettled))

    def has_looked(self, table: Table, phases: Situations) -> bool:
        """Whether stages in these situations have been looked at, ahead of time or not."""
        return phases in self._known(table).looked

    def _arranged(self, known: Known) -> Arranged:
        if known.arranged is None:
            known.arranged = arranged(self.model, known.table, self.ratios)
        return known.arranged

    def _known(self, table: Table) -> Known:
        return self.knowledge.of(table, self.ratios, lambda slot: self.model.memory(slot).batch_bytes(slot))

    def _learn_bytes(self, asked: Sequence[tuple[Known, IntArray]]) -> None:
        """Bytes of all combinations of some bases of arrangements that are alike, of several tables."""
        table, first = asked[0][0].table, int(asked[0][1][0])
        slot = table.slots[int(table.shape_K[first])]
        candidates = StageCandidates.joined([known.table.candidates(index_B) for known, index_B in asked])
        memory, ratios = self.model.memory(slot), self.ratios.each
        shares = moved_shares(memory, slot, candidates, ratios)
        parts = OffloadParts.of(memory, slot, candidates, ratios, shares)
        floors = self.model.copy_floors(slot, candidates, ratios, shares)
        if len(asked) == 1:
            asked[0][0].add(asked[0][1], parts, floors)
            return
        begin = 0
        for known, index_B in asked:
            end = begin + len(index_B)
            known.add(index_B, parts.cut(begin, end), floors.cut(begin, end))
            begin = end


def _may_be_better(asked: Asked, known: Known, found: Kept) -> IntArray:
    """Candidates of which nothing is known that may be better than what others are known to move.

    Args:
        asked: The candidates of the stages of a table.
        known: What is known of the table.
        found: What those fit with of which the bytes are known.
    """
    points = asked.points
    new_B = asked.point_B[known.row_K[points.index_P[asked.point_B]] < 0]
    if not len(new_B) or not len(found.point_J):
        return new_B
    steady_J, once_J = known.seconds(found.place_J)
    done_J = ~np.isnan(steady_J)
    of_D = found.point_J[done_J]
    steady_D = steady_J[done_J] + points.later_P[of_D]
    others = counted_seconds(steady_D, steady_D + once_J[done_J], asked.weight)
    least = counted_seconds(points.steady_P[new_B] / ROOM, points.floor_P[new_B] / ROOM, asked.weight)
    found_B: IntArray = new_B[not_beaten(points.group_P[new_B], *least, (points.group_P[of_D], *others))]
    return found_B


def _bytes_key(slot: StageSlot) -> Hashable:
    """Equal for slots whose stages hold and copy the same: it does not matter which stage of a pipeline they are."""
    return replace(slot, stage_index=0, num_stages=min(2, slot.num_stages), behind=0, parts=()), slot.part
