"""Candidates of a table that keep a part of their state in host memory, evaluated where they may be of use.

Copies add to the steady time and never take from it, and of the boundary time they can hide no more than averaging
gradients and giving out parameters. So whatever a candidate moves, it takes at least its own ``t`` without copies, and
its ``t + d`` is at least ``t`` with what of ``d`` is neither of these two (:attr:`Table.floor_K`). Where a choice that
fits beats both, no ratio is tried. All others are tried with every combination of ratios of the search space, each
evaluated once however many stages ask for it.

Array axes
    K  candidates of a table
    B  those that have been evaluated with offload
    C  combinations of ratios in which something is moved
    J  candidates with ratios
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lightning_mist.cost import CostModel, StageSlot
from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.needs import PeakParts
from lightning_mist.cost.offload import host_microbatch_bytes, host_state_bytes
from lightning_mist.cost.phases import Phase
from lightning_mist.tuner.search_space import OFFLOADED, SearchSpace
from lightning_mist.tuner.tables import ROOM, Table

AT_ONCE = 1 << 14
"""Candidates that are evaluated together: enough to be fast, and few enough to take little memory."""


def combinations(search: SearchSpace) -> FloatArray:
    """Every combination of ratios in which something is moved; axes ``C`` and ``O``."""
    ratios = sorted({0.0, *search.offload_ratios})
    each = [ratios if name in search.offload else [0.0] for name in OFFLOADED]
    found = np.array(list(product(*each)), dtype=np.float64)
    result_CO: FloatArray = found[found.max(axis=1) > 0]
    return result_CO


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Candidates with ratios, of which none takes longer than its table's pace.

    Attributes:
        index_J: Which candidate of the table each is.
        offload_JO: What it moves.
        steady_J: Steady seconds.
        boundary_J: Boundary seconds.
        parts: What their peaks are made of.
        host_state_J: Host memory of parameters, gradients and optimizer state.
        host_microbatch_J: Host memory of every microbatch in flight.
    """

    index_J: IntArray
    offload_JO: FloatArray
    steady_J: FloatArray
    boundary_J: FloatArray
    parts: PeakParts
    host_state_J: FloatArray
    host_microbatch_J: FloatArray

    def __len__(self) -> int:
        """How many they are."""
        return len(self.index_J)

    def take(self, index: IntArray) -> "Moved":
        """Some of them."""
        arrays = {name: getattr(self, name)[index] for name in self.__slots__ if name != "parts"}
        return Moved(parts=self.parts.take(index), **arrays)

    @classmethod
    def joined(cls, items: Sequence["Moved"]) -> "Moved":
        """All of them."""
        names = [name for name in cls.__slots__ if name != "parts"]
        arrays = {name: np.concatenate([getattr(item, name) for item in items]) for name in names}
        return cls(parts=PeakParts.joined([item.parts for item in items]), **arrays)

    @classmethod
    def none(cls) -> "Moved":
        """No candidates."""
        none_J = np.empty(0)
        return cls(
            index_J=np.empty(0, dtype=np.int64),
            offload_JO=np.empty((0, len(OFFLOADED))),
            steady_J=none_J,
            boundary_J=none_J,
            parts=PeakParts.none(),
            host_state_J=none_J,
            host_microbatch_J=none_J,
        )

    def fit(self, phases: Sequence[Phase], memory_limit: float, host_limit: float) -> tuple[FloatArray, IntArray]:
        """Peak bytes in some situations, and the candidates that fit.

        Args:
            phases: The situations.
            memory_limit: Bytes of the device.
            host_limit: Bytes of its host memory.
        """
        in_flight = max(phase.others + (phase.kind != "transfer") for phase in phases)
        peak_J = self.parts.peaks(phases)
        host_J = self.host_state_J + in_flight * self.host_microbatch_J
        return peak_J, np.flatnonzero((peak_J <= memory_limit) & (host_J <= host_limit))


class Moving:
    """Evaluates candidates of one table with offload; keeps what it has computed.

    Args:
        model: The cost model.
        table: The candidates.
        ratios_CO: The combinations to try.
    """

    def __init__(self, model: CostModel, table: Table, ratios_CO: FloatArray) -> None:
        self.model, self.table, self.ratios_CO = model, table, ratios_CO
        self.evaluated = 0
        self._is_known_K = np.zeros(len(table), dtype=bool)
        self._found = Moved.none()

    def of(self, index_B: IntArray) -> Moved:
        """Some candidates of the table with every combination of ratios, without those that are too slow.

        Args:
            index_B: Which.
        """
        new_B = index_B[~self._is_known_K[index_B]]
        if len(new_B):
            self._is_known_K[new_B] = True
            shape_B = self.table.shape_K[new_B]
            rows = max(1, AT_ONCE // len(self.ratios_CO))
            items = [self._found]
            for shape in np.unique(shape_B):
                of_shape = new_B[shape_B == shape]
                for begin in range(0, len(of_shape), rows):
                    items.append(self._evaluate(self.table.slots[shape], of_shape[begin : begin + rows]))
            self._found = Moved.joined(items)
        wanted_K = np.zeros(len(self.table), dtype=bool)
        wanted_K[index_B] = True
        return self._found.take(np.flatnonzero(wanted_K[self._found.index_J]))

    def _evaluate(self, slot: StageSlot, index_B: IntArray) -> Moved:
        index_J = np.repeat(index_B, len(self.ratios_CO))
        offload_JO = np.tile(self.ratios_CO, (len(index_B), 1))
        plain = self.table.candidates(index_J)
        candidates = replace(
            plain, offload=OffloadCandidates(**{f"{name}_K": offload_JO[:, o] for o, name in enumerate(OFFLOADED)})
        )
        seconds = self.model.seconds(slot, candidates)
        self.evaluated += len(candidates)
        steady_J, boundary_J = seconds.steady_K, seconds.boundary_K
        kept_J = np.flatnonzero(steady_J <= self.table.pace * ROOM)
        candidates = candidates.take(kept_J)
        memory = self.model.memory(slot)
        needs = memory.needs(slot, candidates)
        return Moved(
            index_J=index_J[kept_J],
            offload_JO=offload_JO[kept_J],
            steady_J=steady_J[kept_J],
            boundary_J=boundary_J[kept_J],
            parts=PeakParts.of(needs),
            host_state_J=host_state_bytes(memory, slot, candidates),
            host_microbatch_J=host_microbatch_bytes(memory, slot, candidates, needs),
        )
