"""What a stage's ranks have of parameters, gradients or optimizer state of which a share is moved to host memory.

Which parameters are moved is said in :mod:`lightning_mist.cost.offload`.

Array axes
    K  candidates
    P  parameters
    R  regions
    H  parameters of one stage
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from lightning_mist.cost.candidates import StageCandidates
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.distinct import distinct_rows
from lightning_mist.cost.held import Holdings
from lightning_mist.cost.regions import ParameterTable, covered
from lightning_mist.plan.sharding import assign_owners

MovedBytes: TypeAlias = Literal["parameters", "changed", "trained"]
"""Bytes of parameters that are moved, of those among them that are trained, and of what only trained ones have."""


def moved_parameters(table: ParameterTable, ratio: float, *, trained: bool) -> BoolArray:
    """Which parameters are moved; axis ``P``.

    Args:
        table: Bytes and uses of all parameters.
        ratio: Share of each unit's bytes that may be moved.
        trained: Whether only trained parameters count (for gradients and optimizer state).
    """
    bytes_P = table.trainable_P if trained else table.bytes_P
    unit_P = np.diff(table.uses_PR, axis=1).argmax(axis=1)
    moved_P = np.zeros(len(bytes_P), dtype=bool)
    if ratio == 0.0:
        return moved_P
    for unit in np.unique(unit_P):
        members = np.flatnonzero((unit_P == unit) & (bytes_P > 0))
        # Bytes are whole numbers: one part in 10^12 is less than one of them, and more than rounding.
        room = ratio * bytes_P[members].sum() * (1 + 1e-12)
        for index in members[np.argsort(-bytes_P[members], kind="stable")]:
            if bytes_P[index] <= room:
                moved_P[index] = True
                room -= bytes_P[index]
    return moved_P


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a stage's ranks have of one kind of state, in bytes of parameters; the most of any rank.

    Attributes:
        resident_K: What stays on the device.
        moved_K: What is in host memory.
        largest_K: The largest moved part of one unit: the size of a buffer.
        unit_K: The largest unit, moved or not.
    """

    resident_K: FloatArray
    moved_K: FloatArray
    largest_K: FloatArray
    unit_K: FloatArray

    def take(self, index_J: IntArray) -> "Shares":
        """Those of some candidates, or of some with ratios, one after another."""
        return Shares(**{name: getattr(self, name).reshape(-1)[index_J] for name in self.__slots__})


class StateShares:
    """Shares of stages of one network; keeps what it has computed.

    Args:
        holdings: The network's parameters.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._moved: dict[tuple[float, bool], BoolArray] = {}
        self._found: dict[tuple[float, ...], tuple[float, ...]] = {}
        self._owned: dict[tuple[int, int, int, bool], tuple[IntArray, IntArray]] = {}
        self._rows: dict[tuple[int, int, int, tuple[float, ...], bool], FloatArray] = {}
        self._displaces: dict[tuple[float, ...], bool] = {}
        self._units: dict[tuple[float, MovedBytes], FloatArray] = {}

    def moved(self, ratio: float, *, trained: bool) -> BoolArray:
        """As :func:`moved_parameters`."""
        key = (ratio, trained)
        if key not in self._moved:
            self._moved[key] = moved_parameters(self._holdings.table, ratio, trained=trained)
        return self._moved[key]

    def displaces(self, ratios: tuple[float, ...]) -> bool:
        """Whether a larger ratio may leave on the device what a smaller one moves and several units use.

        Args:
            ratios: What may be moved, ascending.
        """
        if ratios not in self._displaces:
            shared_P = self._holdings.table.uses_PR[:, -1] > 1
            self._displaces[ratios] = any(
                bool((self.moved(low, trained=trained) & ~self.moved(high, trained=trained) & shared_P).any())
                for trained in (False, True)
                for low, high in pairwise(ratios)
            )
        return self._displaces[ratios]

    def unit_bytes(self, ratio: float, of: MovedBytes) -> FloatArray:
        """Moved bytes that every unit uses, those of several units counted in each; axis ``R``.

        Args:
            ratio: How much is moved.
            of: Of all parameters, of those among the same that are trained, or of what only those have.
        """
        key = ratio, of
        if key not in self._units:
            table = self._holdings.table
            bytes_P = table.trainable_P if of == "trained" else table.bytes_P
            if of == "changed":
                bytes_P = bytes_P * (table.trainable_P > 0)
            used_PR = np.diff(table.uses_PR, axis=1).astype(np.float64)
            self._units[key] = (bytes_P * self.moved(ratio, trained=of == "trained")) @ used_PR
        return self._units[key]

    def of(
        self,
        candidates: StageCandidates,
        ratio_K: FloatArray,
        ranks: int | IntArray,
        shards_K: BoolArray,
        *,
        trained: bool,
    ) -> Shares:
        """The shares of each candidate.

        Args:
            candidates: The stages.
            ratio_K: How much is moved.
            ranks: Ranks with the same parameters, of all candidates or of each.
            shards_K: Whether they own a part each; otherwise every rank has all.
            trained: Whether only trained parameters count.
        """
        low_K, high_K = covered(self._holdings.spec, candidates.start_K, candidates.end_K)
        ranks_K = np.where(shards_K, ranks, 1)
        width = self._holdings.table.uses_PR.shape[1]
        questions, inverse_K = distinct_rows(low_K * width + high_K, ranks_K, ratio_K)
        found = np.array(
            [self._answer((code // width, code % width, *rest), trained) for code, *rest in questions.tolist()]
        )
        resident_K, moved_K, largest_K, unit_K = found.T[:, inverse_K]
        return Shares(resident_K=resident_K, moved_K=moved_K, largest_K=largest_K, unit_K=unit_K)

    def of_ratios(
        self,
        candidates: StageCandidates,
        values: tuple[float, ...],
        ranks: int,
        shards_K: BoolArray,
        *,
        trained: bool,
    ) -> Shares:
        """The shares of each candidate with every ratio, which are a second axis; the other arguments are :meth:`of`'s.

        Args:
            candidates: The stages.
            values: The ratios.
            ranks: Ranks with the same parameters.
            shards_K: Whether they own a part each.
            trained: Whether only trained parameters count.
        """
        low_K, high_K = covered(self._holdings.spec, candidates.start_K, candidates.end_K)
        width = self._holdings.table.uses_PR.shape[1]
        questions, inverse_K = distinct_rows((low_K * width + high_K) * 2 + shards_K)
        rows_UVX = np.empty((len(questions), len(values), 4))
        for row, code in enumerate(questions[:, 0].astype(np.int64).tolist()):
            low, high = divmod(code // 2, width)
            rows_UVX[row] = self._row(low, high, ranks if code % 2 else 1, values, trained)
        resident_KV, moved_KV, largest_KV, unit_KV = np.moveaxis(rows_UVX[inverse_K], -1, 0)
        return Shares(resident_K=resident_KV, moved_K=moved_KV, largest_K=largest_KV, unit_K=unit_KV)

    def _row(self, low: int, high: int, ranks: int, values: tuple[float, ...], trained: bool) -> FloatArray:
        key = low, high, ranks, values, trained
        if key not in self._rows:
            self._rows[key] = np.array([self._answer((low, high, ranks, ratio), trained) for ratio in values])
        return self._rows[key]

    def _answer(self, question: tuple[float, ...], trained: bool) -> tuple[float, ...]:
        key = (*question, float(trained))
        if key not in self._found:
            low, high, ranks = (int(number) for number in question[:3])
            self._found[key] = self._compute(low, high, ranks, question[3], trained)
        return self._found[key]

    def _compute(self, low: int, high: int, ranks: int, ratio: float, trained: bool) -> tuple[float, ...]:
        table = self._holdings.table
        held_P, place_H = self._places(low, high, ranks, trained)
        bytes_H = (table.trainable_P if trained else table.bytes_P)[held_P]
        moved_H, width = self.moved(ratio, trained=trained)[held_P], high - low

        def totals(weights_H: FloatArray) -> FloatArray:
            counted = np.bincount(place_H, weights=weights_H, minlength=ranks * width)
            return np.asarray(counted, dtype=np.float64).reshape(ranks, width)

        kept, away = totals(bytes_H * ~moved_H), totals(bytes_H * moved_H)
        return (
            float(kept.sum(axis=1).max(initial=0.0)),
            float(away.sum(axis=1).max(initial=0.0)),
            float(away.max(initial=0.0)),
            float((kept + away).max(initial=0.0)),
        )

    def _places(self, low: int, high: int, ranks: int, trained: bool) -> tuple[IntArray, IntArray]:
        """Which parameters a stage holds, and of each who owns it and in which unit it is."""
        key = low, high, ranks, trained
        if key not in self._owned:
            table = self._holdings.table
            held_P = np.flatnonzero(table.uses_PR[:, high] > table.uses_PR[:, low])
            bytes_H = (table.trainable_P if trained else table.bytes_P)[held_P]
            # The first unit of this stage that uses it.
            unit_H = np.diff(table.uses_PR[held_P][:, low : high + 1], axis=1).argmax(axis=1)
            owner_H = np.array(assign_owners(bytes_H.astype(np.int64).tolist(), ranks), dtype=np.int64)
            self._owned[key] = held_P, owner_H * (high - low) + unit_H
        return self._owned[key]
