"""What is known of candidates that keep a part of their state in host memory.

Array axes
    K  candidates of a table
    J  candidates with ratios
    B  bases
    O  kinds of state, in the order of ``OFFLOADED``
    S  candidates with ratios whose seconds are known; or arrangements of devices
    Z  ZeRO stages
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.candidates import StageSlot
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.offload_floors import CopyFloors
from lightning_mist.cost.offload_parts import OffloadParts
from lightning_mist.plan import ZeroStage
from lightning_mist.tuner.offload_ratios import Ratios
from lightning_mist.tuner.stage_points import Situations
from lightning_mist.tuner.tables import Table

MOST = 20_000
"""Bases of which it is kept what is known; with all their combinations some kilobytes each."""

MOST_TABLES = 64
"""Tables of which it is kept: those of a few searches, with all their candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Candidates with ratios that fit.

    Attributes:
        point_J: Which candidate of which stage each is.
        offload_JO: What it moves.
        steady_J: Steady seconds, without what the stages behind add.
        boundary_J: Boundary seconds.
        peak_J: Peak bytes.
    """

    point_J: IntArray
    offload_JO: FloatArray
    steady_J: FloatArray
    boundary_J: FloatArray
    peak_J: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """What is so of the arrangements of devices of a table.

    Attributes:
        order_SZ: Of which kinds of state a larger ratio is never faster, by ZeRO stage.
        corner_S: How channels slow each other down: which of ``corners``.
        corners: The weights that occur.
    """

    order_SZ: IntArray
    corner_S: IntArray
    corners: tuple[FloatArray, ...]


@dataclass(slots=True, kw_only=True)
class Known:
    """What has been evaluated of a table, which all stages with its role share; bases in the order they came in.

    Attributes:
        table: The table.
        row_K: Of every candidate its place among the bases, -1 where it is not one of them.
        base_B: The other way round: of every base which candidate it is.
        learned: What the peaks of bases are made of, and what copies add to them at least; joined when it is looked at.
        place_S: Of which combinations of which bases seconds are known, ascending.
        steady_S: Their steady seconds.
        boundary_S: Their boundary seconds.
        looked: The situations of the stages that were looked at.
        arranged: What is so of its arrangements; nothing before it was asked for.
    """

    table: Table
    row_K: IntArray
    base_B: IntArray
    learned: list[tuple[OffloadParts, CopyFloors]]
    place_S: IntArray
    steady_S: FloatArray
    boundary_S: FloatArray
    looked: set[Situations]
    arranged: Arranged | None = None

    def __len__(self) -> int:
        """Number of bases."""
        return len(self.base_B)

    @property
    def parts(self) -> OffloadParts | None:
        """What the peaks of bases are made of; nothing before there are any."""
        return self._joined()[0][0] if self.learned else None

    @property
    def floors(self) -> CopyFloors | None:
        """What copies add to bases at least; nothing before there are any."""
        return self._joined()[0][1] if self.learned else None

    def _joined(self) -> list[tuple[OffloadParts, CopyFloors]]:
        if len(self.learned) > 1:
            parts, floors = zip(*self.learned, strict=True)
            self.learned = [(OffloadParts.joined(parts), CopyFloors.joined(floors))]
        return self.learned

    @classmethod
    def nothing(cls, table: Table) -> "Known":
        """Before anything has been evaluated."""
        none = np.empty(0)
        return cls(
            table=table,
            row_K=np.full(len(table), -1, dtype=np.int64),
            base_B=np.empty(0, dtype=np.int64),
            learned=[],
            place_S=np.empty(0, dtype=np.int64),
            steady_S=none,
            boundary_S=none,
            looked=set(),
        )

    def add(self, index_B: IntArray, parts: OffloadParts, floors: CopyFloors) -> None:
        """Remember what the peaks of some candidates are made of, and what copies add to them at least."""
        self.row_K[index_B] = len(self) + np.arange(len(index_B))
        self.base_B = np.concatenate([self.base_B, index_B])
        self.learned.append((parts, floors))

    def inherit(self, other: "Known", count: int, batch_bytes: Callable[[StageSlot], float]) -> None:
        """Take over what is known of the same candidates in another table: of another pace, or for another batch.

        What stages exchange with others, and what comes once per batch, differs between tables, but not what copies
        add to it (:mod:`lightning_mist.tuner.pieces`).

        Args:
            other: What is known of the other table.
            count: Number of combinations of ratios, of both.
            batch_bytes: The batches that the devices of a slot hold.
        """
        mine, theirs = self.table, other.table
        # The keys of a table begin with its runs of layers.
        if other.parts is None or not (mine.keys and theirs.keys) or mine.keys[0][0] != theirs.keys[0][0]:
            return
        place_of = {key: place for place, key in enumerate(mine.keys)}
        shape_S = np.array([place_of.get(key, -1) for key in theirs.keys], dtype=np.int64)
        is_kin = len(mine) > 0 and bool((shape_S >= 0).any())
        if not is_kin or other.parts is None or other.floors is None:
            return
        shape_B = shape_S[theirs.shape_K[other.base_B]]
        index_B = _found(_codes(mine, mine.shape_K, slice(None)), _codes(theirs, shape_B, other.base_B))
        row_R = np.flatnonzero((shape_B >= 0) & (index_B >= 0) & (self.row_K[index_B] < 0))
        if not len(row_R):
            return
        more = np.array([batch_bytes(mine.slots[shape]) for shape in range(len(mine.slots))])
        less = np.array([batch_bytes(slot) for slot in theirs.slots])
        more_R = more[shape_B[row_R]] - less[theirs.shape_K[other.base_B[row_R]]]
        new_B = np.full(len(index_B), -1, dtype=np.int64)
        new_B[row_R] = len(self) + np.arange(len(row_R))
        self.add(index_B[row_R], other.parts.take(row_R).beside(more_R), other.floors.take(row_R))
        row_T = other.place_S // count
        at_T = np.flatnonzero(new_B[row_T] >= 0)
        row_T, place_T = row_T[at_T], other.place_S[at_T] % count
        here_T, there_T = index_B[row_T], other.base_B[row_T]
        self.note(
            new_B[row_T] * count + place_T,
            other.steady_S[at_T] + (mine.steady_K[here_T] - theirs.steady_K[there_T]),
            other.boundary_S[at_T] + (mine.boundary_K[here_T] - theirs.boundary_K[there_T]),
        )

    def seconds(self, place_J: IntArray) -> tuple[FloatArray, FloatArray]:
        """Steady and boundary seconds, NaN where they are not known."""
        if not len(self.place_S):
            return np.full(len(place_J), np.nan), np.full(len(place_J), np.nan)
        at_J = np.minimum(np.searchsorted(self.place_S, place_J), len(self.place_S) - 1)
        is_there_J = self.place_S[at_J] == place_J
        return np.where(is_there_J, self.steady_S[at_J], np.nan), np.where(is_there_J, self.boundary_S[at_J], np.nan)

    def note(self, place_J: IntArray, steady_J: FloatArray, boundary_J: FloatArray) -> None:
        """Remember the seconds of others."""
        place_S = np.concatenate([self.place_S, place_J])
        order = np.argsort(place_S, kind="stable")
        self.place_S = place_S[order]
        self.steady_S = np.concatenate([self.steady_S, steady_J])[order]
        self.boundary_S = np.concatenate([self.boundary_S, boundary_J])[order]


def _codes(table: Table, shape_J: IntArray, index_J: IntArray | slice) -> IntArray:
    """Numbers that tell candidates from each other, the same in all tables with the same runs of layers.

    Args:
        table: The table.
        shape_J: The arrangement of each candidate.
        index_J: Which of the table they are.
    """
    layers, levels = int(table.windows.layers_W.max(initial=0)) + 1, max(ZeroStage) + 1
    run_J = shape_J * len(table.windows) + table.window_K[index_J]
    code_J: IntArray = (run_J * layers + table.checkpointed_K[index_J]) * levels + table.zero_stage_K[index_J]
    return code_J


def _found(code_K: IntArray, wanted_J: IntArray) -> IntArray:
    """Where numbers are among others, -1 for those that are not."""
    if not len(code_K):
        return np.full(len(wanted_J), -1, dtype=np.int64)
    order = np.argsort(code_K)
    at_J = np.minimum(np.searchsorted(code_K[order], wanted_J), len(order) - 1)
    return np.where(code_K[order[at_J]] == wanted_J, order[at_J], -1)


class Knowledge:
    """What is known of tables, whatever the limits of memory; that of those asked for longest ago is forgotten."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, Hashable], Known] = {}

    def of(self, table: Table, ratios: Ratios, batch_bytes: Callable[[StageSlot], float]) -> Known:
        """What is known of a table, to be added to.

        Args:
            table: The table.
            ratios: Combinations of what may be moved.
            batch_bytes: The batches that the devices of a slot hold.
        """
        # A table that is known is kept, so that no other has its number.
        key = id(table), ratios.key
        found = self._of.pop(key, None)
        if found is None:
            found = Known.nothing(table)
            for (_, asked), other in reversed(self._of.items()):
                if asked == ratios.key:
                    found.inherit(other, len(ratios), batch_bytes)
        # Tables without bases take memory too.
        while self._of and (len(self._of) >= MOST_TABLES or sum(map(len, self._of.values())) + len(found) > MOST):
            del self._of[next(iter(self._of))]
        self._of[key] = found
        return found
