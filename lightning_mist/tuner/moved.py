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
    B  those that are tried with offload
    C  combinations of ratios, nothing moved first
    J  candidates with ratios
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.offload_parts import OffloadParts, moved_shares
from lightning_mist.tuner.moved_kept import Kept, arranged, floors_of, in_blocks, kept
from lightning_mist.tuner.moved_known import Arranged, Knowledge, Known, Moved, Situations
from lightning_mist.tuner.moved_ratios import Ratios
from lightning_mist.tuner.moved_settled import Unsettled, counted_seconds, learn_seconds, next_ones
from lightning_mist.tuner.pareto import not_beaten
from lightning_mist.tuner.tables import ROOM, Table

AT_ONCE = 1 << 14
"""Candidates that are evaluated together: enough to be fast, and few enough to take little memory."""


class TimeIsUpError(Exception):
    """The search's time was over before all candidates were evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Candidates of a table that could be better than others if they moved something.

    Attributes:
        table: The table.
        counted: The same with what the stages behind cost.
        index_B: The candidates.
        kept_I: Those that fit without offload and are not dominated.
        slowest: The most steady seconds that are of use.
        phases: The situations of their stage.
        ahead: Candidates and situations of stages that will be asked about next, to count bytes together.
        weight: If only the least seconds of a batch count, the number of microbatches but one; else ``None``.
    """

    table: Table
    counted: Table
    index_B: IntArray
    kept_I: IntArray
    slowest: float
    phases: Situations
    ahead: tuple[tuple[IntArray, Situations], ...] = ()
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
            asked: The candidates of every stage, and what they have to be better than.

        Raises:
            TimeIsUpError: If there is no time left to evaluate them.
        """
        # What is known of a table may be forgotten for that of another; here it is still needed.
        every = [self._known(item.table) for item in asked]
        # What is known already may be better than all that a candidate of which nothing is known can move.
        before = [item.index_B[known.row_K[item.index_B] >= 0] for item, known in zip(asked, every, strict=True)]
        before_Q = self._kept(asked, every, before)
        new = [_may_be_better(*item) for item in zip(asked, every, before_Q, strict=True)]
        looked = self._look(asked, every, new)
        more_Q = self._kept(asked, every, new)
        found_Q = [Kept.in_order(pair, len(self.ratios)) for pair in zip(before_Q, more_Q, strict=True)]
        self._settle(self._unsettled(asked, every, found_Q))
        count, found = len(self.ratios), []
        for item, known, own in zip(asked, every, found_Q, strict=True):
            of_J, place_J, peak_J = own.of_J, own.place_J, own.peak_J
            steady_J, boundary_J = known.seconds(place_J)
            fast_J = np.flatnonzero(steady_J <= item.table.pace * ROOM)
            found.append(
                Moved(
                    index_J=of_J[fast_J],
                    offload_JO=self.ratios.offload_CO[place_J[fast_J] % count],
                    steady_J=steady_J[fast_J],
                    boundary_J=boundary_J[fast_J],
                    peak_J=peak_J[fast_J],
                )
            )
        return found, looked * (count - 1)

    def _kept(self, asked: Sequence[Asked], every: Sequence[Known], index: Sequence[IntArray]) -> list[Kept]:
        """What some candidates of every stage may move that fits, and no more than they have to."""
        wanted = [
            (known, self._arranged(known), index_B, item.phases)
            for item, known, index_B in zip(asked, every, index, strict=True)
        ]
        return kept(wanted, self.ratios, (self.memory_limit, self.host_limit))

    def _look(self, asked: Sequence[Asked], every: Sequence[Known], new: Sequence[IntArray]) -> int:
        """Learn the bytes of candidates of which nothing is known; how many these are."""
        of_tables: dict[int, tuple[Known, list[IntArray]]] = {}
        for item, known, index_B in zip(asked, every, new, strict=True):
            wanted = of_tables.setdefault(id(known), (known, []))[1]
            wanted += [index_B, *(other_B for other_B, _ in item.ahead)]
            known.looked |= {item.phases, *(phases for _, phases in item.ahead)}
        alike: dict[Hashable, list[tuple[Known, IntArray]]] = {}
        for known, wanted in of_tables.values():
            every_B = np.unique(np.concatenate(wanted))
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

    def _unsettled(self, asked: Sequence[Asked], every: Sequence[Known], found: Sequence[Kept]) -> list[Unsettled]:
        """Candidates with ratios that fit, and what they have to be better than, of every stage that has any."""
        of_tables: dict[int, list[int]] = {}
        for index, own in enumerate(found):
            if len(own.of_J):
                of_tables.setdefault(id(every[index]), []).append(index)
        result = []
        for members in of_tables.values():
            known, together = every[members[0]], Kept.joined([found[index] for index in members])
            added = floors_of(known, self._arranged(known), self.ratios, together.of_J, together.place_J)
            begin = 0
            for index in members:
                cut = slice(begin, begin + len(found[index].of_J))
                begin = cut.stop
                result.append(_unsettled(known, asked[index], found[index], (added[0][cut], added[1][cut])))
        return result

    def _settle(self, unsettled: Sequence[Unsettled]) -> None:
        """Evaluate whatever may be better than what is known to fit, of all stages the most promising first."""
        while unsettled := [item for item in unsettled if item.narrow()]:
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
            cut_B = np.arange(begin, begin + len(index_B))
            known.add(index_B, parts.take(cut_B), floors.take(cut_B))
            begin += len(index_B)


def _unsettled(known: Known, asked: Asked, found: Kept, added: tuple[FloatArray, FloatArray]) -> Unsettled:
    """Candidates with ratios of one stage, and what copies add to them at least."""
    counted, index_I, of_J = asked.counted, asked.kept_I, found.of_J
    steady_J, whole_J = (counted.steady_K[of_J] + added[0]) / ROOM, (counted.floor_K[of_J] + added[1]) / ROOM
    fitting_I = counted.steady_K[index_I], counted.steady_K[index_I] + counted.boundary_K[index_I]
    return Unsettled.of(
        known,
        found.place_J,
        (asked.table.place_K[of_J], steady_J, whole_J),
        (asked.table.place_K[index_I], *fitting_I),
        later_J=counted.steady_K[of_J] - asked.table.steady_K[of_J],
        open_J=np.flatnonzero(steady_J <= asked.slowest * ROOM),
        weight=asked.weight,
    )


def _may_be_better(asked: Asked, known: Known, found: Kept) -> IntArray:
    """Candidates of which nothing is known that may be better than what others are known to move.

    Args:
        asked: The candidates of a stage.
        known: What is known of their table.
        found: What those fit with of which the bytes are known.
    """
    table, counted = asked.table, asked.counted
    new_B = asked.index_B[known.row_K[asked.index_B] < 0]
    if not len(new_B) or not len(found.of_J):
        return new_B
    steady_J, once_J = known.seconds(found.place_J)
    done_J = ~np.isnan(steady_J)
    of_D = found.of_J[done_J]
    steady_D = steady_J[done_J] + (counted.steady_K[of_D] - table.steady_K[of_D])
    points = counted_seconds(steady_D, steady_D + once_J[done_J], asked.weight)
    least = counted_seconds(counted.steady_K[new_B] / ROOM, counted.floor_K[new_B] / ROOM, asked.weight)
    place_K = table.place_K
    found_B: IntArray = new_B[not_beaten(place_K[new_B], *least, (place_K[of_D], *points))]
    return found_B


def _bytes_key(slot: StageSlot) -> Hashable:
    """Equal for slots whose stages hold and copy the same: it does not matter which stage of a pipeline they are."""
    return replace(slot, stage_index=0, num_stages=min(2, slot.num_stages), behind=0, parts=()), slot.part
