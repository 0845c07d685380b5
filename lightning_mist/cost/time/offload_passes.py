"""Passes of stages that offload through their units.

What happens in them is said in :mod:`lightning_mist.cost.time.offload_seconds`.

Array axes
    K  candidates
    Q  distinct questions among them
    R  units, padded
    U  distinct neighbourhoods of units
    I  units that are asked about together
    S  units of candidates, set after set
    J  distinct ones among them
    F  whether something is the case of a unit
    M  neighbourhoods of questions that occur
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, StageRegions, prefix_sums
from lightning_mist.cost.time.offload_loads import BEFORE, BEHIND, Loads

Flag: TypeAlias = BoolArray | int
"""Whether something is the case: of all candidates, or of each."""

Copies: TypeAlias = tuple[FloatArray, FloatArray]
"""Seconds of copies to the device and to the host."""

Concurrent: TypeAlias = Callable[[FloatArray, FloatArray, Copies | None], FloatArray]
"""Seconds of computing, communicating and, if there are any, copying at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhoods:
    """Units with different neighbours: most layers are like others.

    Attributes:
        places_U: A unit with each neighbourhood.
        place_R: Which of them each unit is like.
    """

    places_U: IntArray
    place_R: IntArray

    @classmethod
    def of(cls, loads: Loads) -> "Neighbourhoods":
        """Those of all questions."""
        runs_R = np.concatenate([[0], np.cumsum(loads.differs())])
        first_X = np.searchsorted(runs_R, np.arange(runs_R[-1] + 1))
        # Of units that are like the one before nothing has to be compared with others.
        columns_X = np.ascontiguousarray(np.moveaxis(loads.table(first_X), 2, 0))
        kinds: dict[bytes, int] = {}
        kind_X = [kinds.setdefault(column.tobytes(), len(kinds)) for column in columns_X]
        kind_R = [kind_X[run] for run in runs_R.tolist()]
        found: dict[tuple[int, ...], int] = {}
        places: list[int] = []
        place_R: list[int] = []
        for unit in range(len(kind_R) - BEFORE - BEHIND):
            around = tuple(kind_R[unit : unit + BEFORE + BEHIND + 1])
            if around not in found:
                found[around] = len(places)
                places.append(unit)
            place_R.append(found[around])
        return cls(places_U=np.array(places, dtype=np.int64), place_R=np.array(place_R, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Units that are asked about together; 1 where something is the case, else 0.

    First come the neighbourhoods that every question has, twice: as if the activations beside them were of a layer that
    is not recomputed, and of one that is. Then the distinct ones of some of every candidate, which many share.

    Attributes:
        of_S: Which of the latter each unit of every candidate is, set after set.
        place_I: Where they are: question times width plus unit.
        next_I: Whether the unit has one behind it that comes next in a forward, which was before in a backward.
        below_I: Whether it has one in front of it.
        below_recomputed_I: Whether the unit in front is recomputed.
    """

    of_S: IntArray
    place_I: IntArray
    next_I: FloatArray
    second_I: FloatArray
    below_I: FloatArray
    below_recomputed_I: FloatArray
    recomputed_I: FloatArray


class Passes:
    """Seconds of passes through candidates' units.

    Args:
        question_K: Row of the loads that each candidate has.
        concurrent: Seconds of loads on the four channels.
    """

    def __init__(
        self,
        loads: Loads,
        question_K: IntArray,
        regions: StageRegions,
        concurrent: Concurrent,
        kinds: "Neighbourhoods",
    ) -> None:
        self.loads, self.question_K, self.concurrent, self.kinds = loads, question_K, concurrent, kinds
        self.width = loads.width
        self.low_K, self.high_K, self.last_K = regions.low_K, regions.high_K, regions.last_K
        self.first_K, self.middle_K = regions.first_K, regions.middle_K
        # The unit above the recomputed layers fetches what the last of them keeps.
        self.is_inside_K = (self.middle_K > np.maximum(self.first_K, self.low_K)) & (self.middle_K < self.last_K)

    def forward(self, *, copies: bool, edge: bool = False) -> FloatArray:
        """Seconds of one forward: with copies or as if there were none, the first of a batch or another."""
        found, (low_KS, before_K, last_K) = self._seconds(self._forward(copies, edge), self.forwards.of_S)
        # What goes away beside a unit is what the unit below it keeps.
        begin_K = self.low_K + 1
        end_K = np.maximum(self.high_K - 2, begin_K)
        total_K = self._between(found[0], begin_K, end_K)
        kept_K = np.maximum(self.first_K + 1, begin_K), self.middle_K + 1
        total_K += self._exchanged(found, *kept_K, end_K)
        total_K += low_KS + before_K * (self.high_K - 2 > self.low_K) + last_K * (self.last_K > self.low_K)
        return total_K + self._forward_ends(copies, edge)

    def _forward_ends(self, copies: bool, edge: bool) -> FloatArray:
        """What of a forward hides behind nothing."""
        low_K, last_K = self.low_K, self.last_K
        total_K = self._at("unshard", low_K)
        if edge:
            update_K, none_K = self._at("update", low_K), np.zeros(1)
            total_K = total_K + self._at("gather", low_K)
            if copies:
                beside_K = self._at("state_in", low_K + 1) * (last_K > low_K)
                total_K += self.concurrent(update_K, none_K, (beside_K, none_K)) + self._at("state_in", low_K)
            else:
                total_K += update_K
        if copies:
            total_K = total_K + self._last_activations("out")
            if edge:
                total_K += self._at("frozen_in", low_K)
        return total_K

    def update(self) -> FloatArray:
        """Seconds of updating all units behind the last backward, and of what only a first forward fetches."""
        low_K, last_K = self.low_K, self.last_K
        values = tuple(self.loads[name] for name in ("update", "state_in", "state_out"))
        update_QR, in_QR, out_QR = values
        none_QR = np.zeros_like(update_QR)
        ahead_QR, behind_QR = (np.roll(values_QR, by, axis=1) for values_QR, by in ((in_QR, -1), (out_QR, 1)))
        middle, first, last, alone = (
            prefix_sums(self.concurrent(update_QR, none_QR, copies))[:, BEFORE:]
            for copies in ((ahead_QR, behind_QR), (ahead_QR, none_QR), (none_QR, behind_QR), (none_QR, none_QR))
        )
        many_K = self._between(first, low_K, low_K + 1) + self._between(middle, low_K + 1, last_K)
        many_K += self._between(last, last_K, self.high_K)
        total_K = np.where(last_K > low_K, many_K, self._between(alone, low_K, self.high_K))
        total_K += self._at("state_in", low_K) + self._at("state_out", last_K) + self._at("parameters_in", low_K)
        beside_K = self._at("parameters_in", low_K + 1) * (last_K > low_K)
        return total_K + np.maximum(beside_K - self._at("forward", low_K), 0.0)

    def _forward(self, copies: bool, edge: bool) -> FloatArray:
        """Seconds of forwards of units: neighbourhoods; the first unit, the last but one and the last of each."""
        asked, at = self.forwards, self._behind(self.forwards.place_I)
        compute, network = at("forward"), at("unshard", 1)
        if edge:
            compute, network = compute + at("update", 1) * asked.next_I, network + at("gather", 1)
        network *= asked.next_I
        if not copies:
            return self.concurrent(compute, network, None)
        # But at the beginning of a batch the two outermost units are there still.
        is_away_I = asked.next_I if edge else asked.next_I * asked.below_I
        to_device, waited = self._parameters("frozen_in" if edge else "parameters_in", 1, asked, is_away_I)
        to_host = np.where(asked.below_recomputed_I, at("checkpoint_out", -1), at("saved_out", -1)) * asked.below_I
        if edge:
            to_device += at("state_in", 2) * asked.second_I
            to_host += at("state_out")
        return self.concurrent(compute, network, (to_device, to_host)) + waited

    @cached_property
    def occurs_QU(self) -> BoolArray:
        """Which neighbourhoods units between the first and the last of a question's candidates have."""
        found_QU = np.zeros((len(self.loads), len(self.kinds.places_U)), dtype=bool)
        for kind in range(found_QU.shape[1]):
            before = prefix_sums(self.kinds.place_R == kind)
            found_QU[self.question_K[before[self.last_K] > before[self.low_K + 1]], kind] = True
        return found_QU

    @cached_property
    def forwards(self) -> _Asked:
        """What forwards ask about."""
        low_K, high_K = self.low_K, self.high_K
        length_K = high_K - low_K
        return self._asked(
            (low_K, high_K - 2, high_K - 1),
            next_=(length_K > 1, 1, 0),
            second=(length_K > 2, 0, 0),
            below=(0, 1, 1),
            below_recomputed=(0, self._is_recomputed(high_K - 3), self._is_recomputed(high_K - 2)),
        )

    def backward(self, *, copies: bool, edge: bool = False) -> FloatArray:
        """Seconds of one backward: with copies or as if there were none, the last of a batch or another."""
        found, (middle_K, without_K, low_K, last_K) = self._seconds(self._backward(copies, edge), self.backwards.of_S)
        begin_K = self.low_K + 1
        total_K = self._between(found[0], begin_K, self.last_K)
        total_K += self._exchanged(found, np.maximum(self.first_K, begin_K), self.middle_K, self.last_K)
        total_K += (middle_K - without_K) * self.is_inside_K
        total_K += low_K + last_K * (self.last_K > self.low_K)
        return total_K + self._backward_ends(copies, edge)

    def _backward_ends(self, copies: bool, edge: bool) -> FloatArray:
        """What of a backward hides behind nothing."""
        low_K, last_K = self.low_K, self.last_K
        total_K = self._at("unshard", last_K) + self._at("scatter", low_K)
        if edge:
            total_K = total_K + self._at("reduce", low_K)
        if copies:
            total_K = total_K + self._last_activations("in")
        return total_K

    def _backward(self, copies: bool, edge: bool) -> FloatArray:
        """Seconds of backwards of units."""
        # Of each candidate the unit above the recomputed layers twice, with what the one below it keeps and without,
        # the first and the last.
        asked, at = self.backwards, self._behind(self.backwards.place_I)
        compute = at("backward") + at("again") * asked.recomputed_I
        above = at("scatter", 1) + at("reduce", 1) if edge else at("scatter", 1)
        network = at("unshard", -1) * asked.below_I + above * asked.next_I
        if not copies:
            return self.concurrent(compute, network, None)
        to_device, waited = self._parameters("parameters_in", -1, asked, asked.below_I * asked.next_I)
        to_device += np.where(
            asked.below_recomputed_I, at("checkpoint_in", -1), at("saved_in", -1)
        ) * asked.below_I + at("gradients_in")
        return self.concurrent(compute, network, (to_device, at("gradients_out") * asked.below_I)) + waited

    def _parameters(
        self, name: str, offset: int, asked: _Asked, is_there_I: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Fetching parameters of a neighbour: what happens beside computing, and what computing waits for."""
        fetched_I = self._behind(asked.place_I)(name, offset) * is_there_I
        waited_I = fetched_I * self.loads.waits_Q.take(asked.place_I // self.width)
        return fetched_I - waited_I, waited_I

    @cached_property
    def backwards(self) -> _Asked:
        """What backwards ask about."""
        low_K, last_K = self.low_K, self.last_K
        middle_K = np.where(self.is_inside_K, self.middle_K, low_K)
        return self._asked(
            (middle_K, middle_K, low_K, last_K),
            next_=(1, 1, last_K > low_K, 0),
            second=(0, 0, 0, 0),
            below=(1, 1, 0, 1),
            below_recomputed=(1, 0, 0, self._is_recomputed(last_K - 1)),
            recomputed=(0, 0, self._is_recomputed(low_K), self._is_recomputed(last_K)),
        )

    def _asked(
        self,
        units: Sequence[IntArray],
        *,
        next_: Sequence[Flag],
        second: Sequence[Flag],
        below: Sequence[Flag],
        below_recomputed: Sequence[Flag],
        recomputed: Sequence[Flag] | None = None,
    ) -> _Asked:
        """Every neighbourhood of every question, and some units of each candidate."""
        question_M, kind_M = np.nonzero(self.occurs_QU)
        inside_M = question_M * self.width + self.kinds.places_U[kind_M]
        count, many = len(self.low_K), len(inside_M)
        start_K = self.question_K * self.width
        is_recomputed = below_recomputed if recomputed is None else recomputed
        given = (next_, second, below, below_recomputed, is_recomputed)
        flag_FS = np.empty((len(given), count * len(units)), dtype=np.int64)
        for place, values in enumerate(given):
            for index, value in enumerate(values):
                flag_FS[place, index * count : (index + 1) * count] = value
        bits_F = 1 << np.arange(len(given))
        place_S = np.concatenate([start_K + unit_K for unit_K in units])
        code_J, of_S = np.unique((place_S << len(given)) + bits_F @ flag_FS, return_inverse=True)
        flag_FJ = ((code_J & bits_F[:, None]) > 0).astype(np.float64)
        next_I, second_I, below_I, below_recomputed_I, recomputed_I = (
            np.concatenate([np.full(many, first), np.ones(many), flag_J])
            for first, flag_J in zip((1.0, 1.0, 1.0, 0.0, 0.0), flag_FJ, strict=True)
        )
        return _Asked(
            of_S=of_S,
            place_I=np.concatenate([inside_M, inside_M, code_J >> len(given)]),
            next_I=next_I,
            second_I=second_I,
            below_I=below_I,
            below_recomputed_I=below_recomputed_I,
            recomputed_I=recomputed_I,
        )

    def _seconds(self, found_I: FloatArray, of_S: IntArray) -> tuple[FloatArray, FloatArray]:
        """Sums over the units in front of each, axes recomputed or not, ``Q`` and ``R`` and one more; and the rest."""
        found_XM, rest_J = np.split(found_I, [2 * int(self.occurs_QU.sum())])
        found_XQU, rest_S = np.zeros((2, *self.occurs_QU.shape)), rest_J[of_S]
        found_XQU[:, self.occurs_QU] = found_XM.reshape(2, -1)
        return prefix_sums(found_XQU[:, :, self.kinds.place_R]), rest_S.reshape(-1, len(self.low_K))

    def _is_recomputed(self, unit_K: IntArray) -> BoolArray:
        return (unit_K >= self.first_K) & (unit_K < self.middle_K)

    def _last_activations(self, direction: str) -> FloatArray:
        kept_K, saved_K = (self._at(f"last_{name}_{direction}", self.last_K) for name in ("checkpoint", "saved"))
        return np.where(self._is_recomputed(self.last_K), kept_K, saved_K)

    def _behind(self, place_I: IntArray) -> "Callable[..., FloatArray]":
        """Loads by name of units some places behind others, of which question times width plus unit is given."""
        # What is in front of the first unit of all is that of any other; nobody counts it.

        def at(name: str, offset: int = 0) -> FloatArray:
            return self.loads[name].reshape(-1)[BEFORE + offset :].take(place_I)

        return at

    def _at(self, name: str, unit_K: IntArray) -> FloatArray:
        return self._behind(self.question_K * self.width + unit_K)(name)

    def _between(self, prefix_QR: FloatArray, begin_K: IntArray, end_K: IntArray) -> FloatArray:
        end_K = np.maximum(end_K, begin_K)
        return prefix_QR[self.question_K, end_K] - prefix_QR[self.question_K, begin_K]

    def _exchanged(self, prefix_XQR: FloatArray, begin_K: IntArray, end_K: IntArray, limit_K: IntArray) -> FloatArray:
        """What changes if units from one to before another, but not beyond a limit, are of the second kind."""
        end_K = np.minimum(end_K, limit_K)
        return self._between(prefix_XQR[1] - prefix_XQR[0], np.minimum(begin_K, end_K), end_K)
