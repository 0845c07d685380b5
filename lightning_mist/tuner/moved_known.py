"""What is known of candidates that keep a part of their state in host memory.

Array axes
    K  candidates of a table
    J  candidates with ratios
    B  bases
    O  kinds of state, in the order of ``OFFLOADED``
    S  candidates with ratios whose seconds are known
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.offload_floors import CopyFloors
from lightning_mist.cost.offload_parts import OffloadParts
from lightning_mist.cost.phases import Phase
from lightning_mist.tuner.tables import Table

MOST = 20_000
"""Bases of which it is kept what is known; with all their combinations some kilobytes each."""

MOST_TABLES = 64
"""Tables of which it is kept: those of a few searches, with all their candidates."""

Situations = tuple[Phase, ...]
"""The situations of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Candidates with ratios that fit.

    Attributes:
        index_J: Which candidate of the table each is.
        offload_JO: What it moves.
        steady_J: Steady seconds.
        boundary_J: Boundary seconds.
        peak_J: Peak bytes.
    """

    index_J: IntArray
    offload_JO: FloatArray
    steady_J: FloatArray
    boundary_J: FloatArray
    peak_J: FloatArray

    @classmethod
    def joined(cls, items: Sequence["Moved"]) -> "Moved":
        """All of several."""
        return cls(**{name: np.concatenate([getattr(item, name) for item in items]) for name in cls.__slots__})


@dataclass(slots=True, kw_only=True)
class Known:
    """What has been evaluated of a table, which all stages with its role share; bases in the order they came in.

    Attributes:
        table: The table.
        row_K: Of every candidate its place among the bases, -1 where it is not one of them.
        base_B: The other way round: of every base which candidate it is.
        parts: What the peaks of bases are made of; nothing before there are any.
        floors: What copies add to them at least; nothing before there are any.
        place_S: Of which combinations of which bases seconds are known, ascending.
        steady_S: Their steady seconds.
        boundary_S: Their boundary seconds.
        looked: The situations of the stages that were looked at.
    """

    table: Table
    row_K: IntArray
    base_B: IntArray
    parts: OffloadParts | None
    floors: CopyFloors | None
    place_S: IntArray
    steady_S: FloatArray
    boundary_S: FloatArray
    looked: set[Situations]

    def __len__(self) -> int:
        """Number of bases."""
        return 0 if self.parts is None else len(self.parts)

    @classmethod
    def nothing(cls, table: Table) -> "Known":
        """Before anything has been evaluated."""
        none = np.empty(0)
        return cls(
            table=table,
            row_K=np.full(len(table), -1, dtype=np.int64),
            base_B=np.empty(0, dtype=np.int64),
            parts=None,
            floors=None,
            place_S=np.empty(0, dtype=np.int64),
            steady_S=none,
            boundary_S=none,
            looked=set(),
        )

    def add(self, index_B: IntArray, parts: OffloadParts, floors: CopyFloors) -> None:
        """Remember what the peaks of some candidates are made of, and what copies add to them at least."""
        self.row_K[index_B] = len(self) + np.arange(len(index_B))
        self.base_B = np.concatenate([self.base_B, index_B])
        self.parts = parts if self.parts is None else OffloadParts.joined([self.parts, parts])
        self.floors = floors if self.floors is None else CopyFloors.joined([self.floors, floors])

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


class Knowledge:
    """What is known of tables, whatever the limits of memory; that of those asked for longest ago is forgotten."""

    def __init__(self) -> None:
        self._of: dict[Hashable, Known] = {}

    def of(self, table: Table, ratios: Hashable) -> Known:
        """What is known of a table, to be added to.

        Args:
            table: The table.
            ratios: What tells combinations of ratios from others.
        """
        # A table that is known is kept, so that no other has its number.
        key = id(table), ratios
        found = self._of.pop(key, None)
        found = Known.nothing(table) if found is None else found
        # Tables without bases take memory too.
        while self._of and (len(self._of) >= MOST_TABLES or sum(map(len, self._of.values())) + len(found) > MOST):
            del self._of[next(iter(self._of))]
        self._of[key] = found
        return found
