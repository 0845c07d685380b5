"""Seconds of stages that keep a part of their state in host memory.

What is where is said in :mod:`lightning_mist.cost.offload`; here is when it moves. A stage goes through its units
(head, layers, tail), and beside each of them its four channels are busy with what the unit needs and with what its
neighbours do. With ``C`` the channels' concurrent seconds (:mod:`lightning_mist.cost.overlap`) of loads to compute, to
exchange, to copy to the device and to the host, the unit ``r`` of a stage ``[low, high)`` takes

    forward        C(f_r, u_{r+1}, p_{r+1}, a_{r-1})
    first forward  C(f_r + o_{r+1}, u_{r+1} + e_{r+1}, p_{r+1} + s_{r+2}, a_{r-1} + w_r)
    backward       C(b_r, u_{r-1} + g_{r+1}, p_{r-1} + q_{r-1} + a_{r-1}, z_{r+1})
    last backward  the same with the averaging m_{r+1} of gradients beside it

where what lies outside the stage is nothing, and

    f, b  computing forward and backward, of recomputed layers with another forward; o the update
    u, g  unsharding parameters (ZeRO-3), reducing gradients in every microbatch (from ZeRO-2 on)
    m, e  averaging gradients after the last microbatch, giving out updated parameters (up to ZeRO-2)
    p     fetching moved parameters;  q, z  fetching moved gradients and writing them back
    a     moving activations away behind a layer, and back ahead of its backward
    s, w  fetching what an update needs (state, gradients), writing back what it changed (state, parameters)

At the ends there is nothing to hide behind: a forward begins with ``u + p`` of its first unit and ends when ``a`` of
its last has gone, a backward begins with ``u + p + q + a`` of its last unit and ends when ``g`` (``m``) and ``z`` of
its first have gone. If parameters, gradients or optimizer state are moved, the update of a batch happens unit by unit
in the first forward of the next: ``s`` and ``p`` of the first unit come first, then its update, beside which the second
unit's state comes. No more is on the device then than in a backward at the same unit: activations of the units before
it, gradients of those behind it. Gradients that the first microbatch makes are fetched like those of others, which is
at most too much by one fetch per batch; with one microbatch there is nothing to fetch.

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

from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.channels import CopyRates
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.offload_loads import BEFORE, BEHIND, Loads, WithoutCopies, loads_of
from lightning_mist.cost.overlap import concurrent_seconds
from lightning_mist.cost.regions import covered
from lightning_mist.hardware import Interference

Flag: TypeAlias = BoolArray | bool
"""Whether something is the case: of all places that are asked about, or of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySeconds:
    """What host copies do to the seconds of stages; all zero for candidates that move nothing.

    Attributes:
        copies_K: What they add to a middle microbatch.
        forward_copies_K: The part of it that belongs to the forward.
        update_copies_K: What they add to the update.
        gather_K: Giving out updated parameters, as far as it does not hide in the first forward.
        reduce_K: What averaging gradients takes more (or less) because copies run beside the last backward too.
        is_deferred_K: Whether the update happens in the first forward, so that ``gather_K`` applies.
    """

    copies_K: FloatArray
    forward_copies_K: FloatArray
    update_copies_K: FloatArray
    gather_K: FloatArray
    reduce_K: FloatArray
    is_deferred_K: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Which of four passes is meant: with copies or as if there were none, at the edge of a batch or not."""

    copies: bool
    edge: bool


def copy_seconds(
    memory: MemoryModel,
    slot: StageSlot,
    candidates: StageCandidates,
    known: WithoutCopies,
    rates: CopyRates,
    interference: Interference | None,
    *,
    across_nodes: bool,
) -> CopySeconds:
    """Seconds of host copies.

    Args:
        memory: The network, or one tensor-parallel rank's part of it.
        slot: Their place.
        candidates: The stages.
        known: Their seconds without copies.
        rates: Bytes per second of copies.
        interference: How channels slow each other down; ``None`` where they take turns.
        across_nodes: Whether the ranks that share parameters are in several nodes.
    """
    count, offload = len(candidates), candidates.offload
    if offload is None:
        return no_copies(count)
    is_deferred_K = (offload.parameters_K > 0) | (offload.gradients_K > 0) | (offload.optimizer_K > 0)
    at_J = np.flatnonzero(is_deferred_K | (offload.activations_K > 0))
    if not len(at_J):
        return no_copies(count)
    some, known_J = candidates.take(at_J), _known_of(known, at_J, is_deferred_K[at_J])
    loads, question_J = loads_of(memory, slot, some, known_J, rates)

    def concurrent(compute: FloatArray, network: FloatArray, to_device: FloatArray, to_host: FloatArray) -> FloatArray:
        return concurrent_seconds(compute, network, to_device, to_host, interference, across_nodes)

    passes = _Passes(loads, question_J, some, covered(memory.spec, some.start_K, some.end_K), concurrent)
    found = {name: np.zeros(count) for name in ("copies", "forward_copies", "update_copies", "gather", "reduce")}
    for name, values_J in _terms(passes, known_J.update_K).items():
        found[name][at_J] = values_J
    return CopySeconds(**{f"{name}_K": values_K for name, values_K in found.items()}, is_deferred_K=is_deferred_K)


def no_copies(count: int) -> CopySeconds:
    """Of candidates that move nothing.

    Args:
        count: How many they are.
    """
    none_K, never_K = np.zeros(count), np.zeros(count, dtype=bool)
    return CopySeconds(
        copies_K=none_K,
        forward_copies_K=none_K,
        update_copies_K=none_K,
        gather_K=none_K,
        reduce_K=none_K,
        is_deferred_K=never_K,
    )


def _known_of(known: WithoutCopies, at_J: IntArray, is_deferred_J: BoolArray) -> WithoutCopies:
    """What is known of some candidates, with the update's part of a first forward."""
    return WithoutCopies(
        compute=known.compute,
        units=known.units,
        update_K=np.where(is_deferred_J, known.update_K[at_J], 0.0),
        reduce_K=known.reduce_K[at_J],
        gather_K=np.where(is_deferred_J, known.gather_K[at_J], 0.0),
    )


def _terms(passes: "_Passes", update_K: FloatArray) -> dict[str, FloatArray]:
    """The differences between passes with copies and without."""
    forward, backward = (
        {(copies, edge): total(_Way(copies=copies, edge=edge)) for copies in (False, True) for edge in (False, True)}
        for total in (passes.forward, passes.backward)
    )
    forward_copies_K = np.maximum(forward[True, False] - forward[False, False], 0.0)
    gather_K = np.maximum(forward[False, True] - forward[False, False] - update_K, 0.0)
    return {
        "copies": forward_copies_K + np.maximum(backward[True, False] - backward[False, False], 0.0),
        "forward_copies": forward_copies_K,
        "update_copies": np.maximum(forward[True, True] - forward[True, False] - update_K - gather_K, 0.0),
        "gather": gather_K,
        "reduce": backward[True, True] - backward[True, False] - (backward[False, True] - backward[False, False]),
    }


class _Passes:
    """Seconds of passes through candidates' units.

    Args:
        loads: Seconds of units.
        question_K: Row of the loads that each candidate has.
        candidates: The stages.
        bounds: Their first unit and one past their last.
        concurrent: Seconds of loads on the four channels.
    """

    def __init__(
        self,
        loads: Loads,
        question_K: IntArray,
        candidates: StageCandidates,
        bounds: tuple[IntArray, IntArray],
        concurrent: Callable[[FloatArray, FloatArray, FloatArray, FloatArray], FloatArray],
    ) -> None:
        self.loads, self.question_K, self.concurrent = loads, question_K, concurrent
        self.low_K, self.high_K = bounds
        # Recomputed layers are the units from ``first`` to before ``middle``.
        self.first_K = candidates.start_K + 1
        self.middle_K = self.first_K + candidates.checkpointed_K
        self.places_U, self.place_R = _neighbourhoods(loads)

    def forward(self, way: _Way) -> FloatArray:
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

    def _forward_ends(self, way: _Way) -> FloatArray:
        """What of a forward hides behind nothing."""
        low_K, last_K = self.low_K, self.high_K - 1
        total_K = self._at("unshard_QR", low_K)
        if way.edge:
            beside_K = np.where(last_K > low_K, self._at("state_in_QR", low_K + 1), 0.0) * way.copies
            none_K = np.zeros_like(beside_K)
            total_K = total_K + self._at("gather_QR", low_K)
            total_K += self.concurrent(self._at("update_QR", low_K), none_K, beside_K, none_K)
        if way.copies:
            total_K = total_K + self._at("parameters_in_QR", low_K) + self._activations("out", last_K)
            if way.edge:
                total_K += self._at("state_in_QR", low_K)
        return total_K

    def _forward(
        self,
        q: IntArray,
        r: IntArray,
        way: _Way,
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

        def at(name: str, offset: int = 0) -> FloatArray:
            return self._load(name, q, r + offset)

        compute, network = at("forward_QR"), at("unshard_QR", 1) * next_
        to_device = to_host = np.zeros(1)
        if way.edge:
            compute, network = compute + at("update_QR", 1) * next_, network + at("gather_QR", 1) * next_
        if way.copies:
            to_device = at("parameters_in_QR", 1) * next_
            to_host = np.where(kept, at("kept_out_QR", -1), at("saved_out_QR", -1)) * below
            if way.edge:
                to_device, to_host = to_device + at("state_in_QR", 2) * second, to_host + at("state_out_QR")
        return self.concurrent(compute, network, to_device, to_host)

    def backward(self, way: _Way) -> FloatArray:
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

    def _backward_ends(self, way: _Way) -> FloatArray:
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
        way: _Way,
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

        def at(name: str, offset: int = 0) -> FloatArray:
            return self._load(name, q, r + offset)

        compute = at("backward_QR") + np.where(again, at("forward_QR"), 0.0)
        above_network = at("scatter_QR", 1) + at("reduce_QR", 1) if way.edge else at("scatter_QR", 1)
        network = at("unshard_QR", -1) * below + above_network * above
        to_device = to_host = np.zeros(1)
        if way.copies:
            activations = np.where(kept, at("kept_in_QR", -1), at("saved_in_QR", -1))
            to_device = (at("parameters_in_QR", -1) + at("gradients_in_QR", -1) + activations) * below
            to_host = at("gradients_out_QR", 1) * above
        return self.concurrent(compute, network, to_device, to_host)

    def _is_recomputed(self, unit_K: IntArray) -> BoolArray:
        recomputed_K: BoolArray = (unit_K >= self.first_K) & (unit_K < self.middle_K)
        return recomputed_K

    def _activations(self, direction: str, unit_K: IntArray) -> FloatArray:
        kept_K, saved_K = (self._at(f"{name}_{direction}_QR", unit_K) for name in ("kept", "saved"))
        return np.where(self._is_recomputed(unit_K), kept_K, saved_K)

    def _load(self, name: str, q: IntArray, r: IntArray) -> FloatArray:
        values: FloatArray = getattr(self.loads, name)[q, np.maximum(r + BEFORE, 0)]
        return values

    def _at(self, name: str, unit_K: IntArray) -> FloatArray:
        return self._load(name, self.question_K, unit_K)

    def _prefix(self, seconds: Callable[[IntArray, IntArray], FloatArray]) -> FloatArray:
        """Sums over the units in front of each, with axes ``Q`` and ``R`` and one more; each neighbourhood once."""
        rows = np.arange(len(self.loads.forward_QR))[:, None]
        found_QU = np.broadcast_to(seconds(rows, self.places_U[None]), (len(rows), len(self.places_U)))
        return np.pad(np.cumsum(found_QU[:, self.place_R], axis=1), ((0, 0), (1, 0)))

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


def _neighbourhoods(loads: Loads) -> tuple[IntArray, IntArray]:
    """Units with different neighbours, and which of them each unit is like: most layers are like others."""
    columns_RX = np.ascontiguousarray(np.moveaxis(loads.table(), 2, 0))
    kinds: dict[bytes, int] = {}
    kind_R = [kinds.setdefault(column.tobytes(), len(kinds)) for column in columns_RX]
    found: dict[tuple[int, ...], int] = {}
    places: list[int] = []
    place_R: list[int] = []
    for unit in range(len(kind_R) - BEFORE - BEHIND):
        around = tuple(kind_R[unit : unit + BEFORE + BEHIND + 1])
        if around not in found:
            found[around] = len(places)
            places.append(unit)
        place_R.append(found[around])
    return np.array(places, dtype=np.int64), np.array(place_R, dtype=np.int64)
