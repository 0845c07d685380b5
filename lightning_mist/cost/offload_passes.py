"""Passes of stages that offload through their units; :mod:`lightning_mist.cost.offload_time` says what happens in them.

Array axes
    K  candidates
    Q  distinct questions among them
    R  units, padded
    U  distinct neighbourhoods of units
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.candidates import StageCandidates
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.offload_loads import BEFORE, BEHIND, Loads

Flag: TypeAlias = BoolArray | bool
"""Whether something is the case: of all places that are asked about, or of each."""

Copies: TypeAlias = tuple[FloatArray, FloatArray]
"""Seconds of copies to the device and to the host."""

Concurrent: TypeAlias = Callable[[FloatArray, FloatArray, Copies | None], FloatArray]
"""Seconds of computing, communicating and, if there are any, copying at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Which of four passes is meant: with copies or as if there were none, at the edge of a batch or not."""

    copies: bool
    edge: bool


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


class Passes:
    """Seconds of passes through candidates' units.

    Args:
        loads: Seconds of units.
        question_K: Row of the loads that each candidate has.
        candidates: The stages.
        bounds: Their first unit and one past their last.
        concurrent: Seconds of loads on the four channels.
        kinds: Units with different neighbours.
    """

    def __init__(
        self,
        loads: Loads,
        question_K: IntArray,
        candidates: StageCandidates,
        bounds: tuple[IntArray, IntArray],
        concurrent: Concurrent,
        kinds: "Neighbourhoods",
    ) -> None:
        self.loads, self.question_K, self.concurrent, self.kinds = loads, question_K, concurrent, kinds
        self.width = loads.forward_QR.shape[1]
        self.low_K, self.high_K = bounds
        # Recomputed layers are the units from ``first`` to before ``middle``.
        self.first_K = candidates.start_K + 1
        self.middle_K = self.first_K + candidates.checkpointed_K

    def forward(self, way: Way) -> FloatArray:
        """Seconds of one forward."""
        low_K, high_K, q_K = self.low_K, self.high_K, self.question_K
        length_K = high_K - low_K
        plain, kept = (self._prefix(partial(self._forward, way=way, kept=kept)) for kept in (False, True))
        # What goes away beside a unit is what the unit below it keeps.
        end_K = np.maximum(high_K - 2, low_K + 1)
        total_K = self._between(plain, low_K + 1, end_K)
        total_K += self._exchanged(kept, plain, np.maximum(self.first_K + 1, low_K + 1), self.middle_K + 1, end_K)
        total_K += self._forward(q_K, low_K, way, next_=length_K > 1, second=length_K > 2, below=False)
        for unit_K, next_ in ((high_K - 2, True), (high_K - 1, False)):
            kept_K = self._is_recomputed(unit_K - 1)
            total_K += np.where(
                unit_K > low_K, self._forward(q_K, unit_K, way, next_=next_, second=False, kept=kept_K), 0.0
            )
        return total_K + self._forward_ends(way)

    def _forward_ends(self, way: Way) -> FloatArray:
        """What of a forward hides behind nothing."""
        low_K, last_K = self.low_K, self.high_K - 1
        total_K = self._at("unshard_QR", low_K)
        if way.edge:
            update_K, none_K = self._at("update_QR", low_K), np.zeros(1)
            total_K = total_K + self._at("gather_QR", low_K)
            if way.copies:
                beside_K = self._at("state_in_QR", low_K + 1) * (last_K > low_K)
                total_K += self.concurrent(update_K, none_K, (beside_K, none_K)) + self._at("state_in_QR", low_K)
            else:
                total_K += update_K
        if way.copies:
            total_K = total_K + self._at("parameters_in_QR", low_K) + self._activations("out", last_K)
        return total_K

    def _forward(
        self,
        q: IntArray,
        r: IntArray,
        way: Way,
        *,
        next_: Flag = True,
        second: Flag = True,
        below: Flag = True,
        kept: Flag = False,
    ) -> FloatArray:
        """Seconds of a unit's forward.

        Args:
            q: Rows of the loads.
            r: Units.
            way: Which pass.
            next_: Whether a unit follows.
            second: Whether two do.
            below: Whether there is a unit below.
            kept: Whether that will be recomputed.
        """
        place = q * self.width + r

        def at(name: str, offset: int = 0) -> FloatArray:
            return self._load(name, place, offset)

        compute, network, copies = at("forward_QR"), at("unshard_QR", 1) * next_, None
        if way.edge:
            compute, network = compute + at("update_QR", 1) * next_, network + at("gather_QR", 1) * next_
        if way.copies:
            to_device = at("parameters_in_QR", 1) * next_
            to_host = np.where(kept, at("kept_out_QR", -1), at("saved_out_QR", -1)) * below
            if way.edge:
                to_device, to_host = to_device + at("state_in_QR", 2) * second, to_host + at("state_out_QR")
            copies = to_device, to_host
        return self.concurrent(compute, network, copies)

    def backward(self, way: Way) -> FloatArray:
        """Seconds of one backward."""
        low_K, high_K, q_K = self.low_K, self.high_K, self.question_K
        plain, kept = (self._prefix(partial(self._backward, way=way, again=kept, kept=kept)) for kept in (False, True))
        last_K = high_K - 1
        total_K = self._between(plain, low_K + 1, last_K)
        total_K += self._exchanged(kept, plain, np.maximum(self.first_K, low_K + 1), self.middle_K, last_K)
        # The unit above the recomputed layers fetches what the last of them keeps.
        is_inside_K = (self.middle_K > self.first_K) & (self.middle_K > low_K) & (self.middle_K < last_K)
        middle_K = np.where(is_inside_K, self.middle_K, low_K)
        changed_K = self._backward(q_K, middle_K, way, kept=True) - self._backward(q_K, middle_K, way)
        total_K += np.where(is_inside_K, changed_K, 0.0)
        again_K = self._is_recomputed(low_K)
        total_K += self._backward(q_K, low_K, way, below=False, above=last_K > low_K, again=again_K)
        again_K, kept_K = self._is_recomputed(last_K), self._is_recomputed(last_K - 1)
        total_K += np.where(
            last_K > low_K, self._backward(q_K, last_K, way, above=False, again=again_K, kept=kept_K), 0.0
        )
        return total_K + self._backward_ends(way)

    def _backward_ends(self, way: Way) -> FloatArray:
        """What of a backward hides behind nothing."""
        low_K, last_K = self.low_K, self.high_K - 1
        total_K = self._at("unshard_QR", last_K) + self._at("scatter_QR", low_K)
        if way.edge:
            total_K = total_K + self._at("reduce_QR", low_K)
        if way.copies:
            total_K = total_K + self._at("parameters_in_QR", last_K) + self._at("gradients_in_QR", last_K)
            total_K += self._activations("in", last_K) + self._at("gradients_out_QR", low_K)
        return total_K

    def _backward(
        self,
        q: IntArray,
        r: IntArray,
        way: Way,
        *,
        below: Flag = True,
        above: Flag = True,
        again: Flag = False,
        kept: Flag = False,
    ) -> FloatArray:
        """Seconds of a unit's backward.

        Args:
            q: Rows of the loads.
            r: Units.
            way: Which pass.
            below: Whether there is a unit below, which comes next.
            above: Whether there is a unit above, which came before.
            again: Whether the unit is recomputed.
            kept: Whether the one below is.
        """
        place = q * self.width + r

        def at(name: str, offset: int = 0) -> FloatArray:
            return self._load(name, place, offset)

        compute = at("backward_QR") + np.where(again, at("forward_QR"), 0.0)
        above_network = at("scatter_QR", 1) + at("reduce_QR", 1) if way.edge else at("scatter_QR", 1)
        network = at("unshard_QR", -1) * below + above_network * above
        copies = None
        if way.copies:
            activations = np.where(kept, at("kept_in_QR", -1), at("saved_in_QR", -1))
            to_device = (at("parameters_in_QR", -1) + at("gradients_in_QR", -1) + activations) * below
            copies = to_device, at("gradients_out_QR", 1) * above
        return self.concurrent(compute, network, copies)

    def _is_recomputed(self, unit_K: IntArray) -> BoolArray:
        recomputed_K: BoolArray = (unit_K >= self.first_K) & (unit_K < self.middle_K)
        return recomputed_K

    def _activations(self, direction: str, unit_K: IntArray) -> FloatArray:
        kept_K, saved_K = (self._at(f"{name}_{direction}_QR", unit_K) for name in ("kept", "saved"))
        return np.where(self._is_recomputed(unit_K), kept_K, saved_K)

    def _load(self, name: str, place: IntArray, offset: int = 0) -> FloatArray:
        """Loads of the units that are so far behind others, of which question times width plus unit is given.

        What is in front of the first unit of all is that of any other; nobody counts it.
        """
        values: FloatArray = getattr(self.loads, name).ravel()[BEFORE + offset :].take(place)
        return values

    def _at(self, name: str, unit_K: IntArray) -> FloatArray:
        return self._load(name, self.question_K * self.width + unit_K)

    def _prefix(self, seconds: Callable[[IntArray, IntArray], FloatArray]) -> FloatArray:
        """Sums over the units in front of each, with axes ``Q`` and ``R`` and one more; each neighbourhood once."""
        rows = np.arange(len(self.loads.forward_QR))[:, None]
        found_QU = np.broadcast_to(seconds(rows, self.kinds.places_U[None]), (len(rows), len(self.kinds.places_U)))
        prefix = np.zeros((len(rows), len(self.kinds.place_R) + 1))
        np.cumsum(found_QU[:, self.kinds.place_R], axis=1, out=prefix[:, 1:])
        return prefix

    def _between(self, prefix: FloatArray, begin_K: IntArray, end_K: IntArray) -> FloatArray:
        result_K: FloatArray = prefix[self.question_K, np.maximum(end_K, begin_K)] - prefix[self.question_K, begin_K]
        return result_K

    def _exchanged(
        self, new: FloatArray, old: FloatArray, begin_K: IntArray, end_K: IntArray, limit_K: IntArray
    ) -> FloatArray:
        """What changes if units from one to before another, but not beyond a limit, are of the new kind."""
        end_K = np.minimum(end_K, limit_K)
        begin_K = np.minimum(begin_K, end_K)
        return self._between(new - old, begin_K, end_K)
