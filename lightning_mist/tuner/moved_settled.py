"""Which candidates with ratios may be better than what is known to fit, and the seconds of those.

Array axes
    K  candidates of a table
    J  candidates with ratios of a stage
    N  candidates with ratios of a table that are asked about
    B  bases, in the order they came in
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.offload_floors import CopyFloors
from lightning_mist.cost.offload_loads import Beforehand
from lightning_mist.cost.together import seconds_of_stages
from lightning_mist.tuner.moved_known import Known
from lightning_mist.tuner.offload_ratios import Ratios
from lightning_mist.tuner.pareto import not_beaten
from lightning_mist.tuner.search_space import OFFLOADED

Points = tuple[IntArray, FloatArray, FloatArray]
"""Groups, and two values in which smaller is better."""

SLACK = 1 + 1 / 8
"""Of candidates that may be better than what is known those come first which no other promises to beat by so much."""

FEW = 256
"""So many are asked about at once, whatever they promise: the first takes as long as these."""


@dataclass(slots=True, kw_only=True)
class Unsettled:
    """Candidates with ratios of one stage that may be better than what is known to fit.

    Attributes:
        known: What is known of their table.
        place_J: Their places among what is known.
        group_J: The run of layers and the devices of each.
        steady_J: What they take at least per microbatch.
        whole_J: What they take at least of a batch and a microbatch.
        later_J: What stages behind add to their steady seconds.
        fitting: What is known to fit.
        open_J: Those that may be better than that.
        weight: If only the least seconds of a batch count, the number of microbatches but one: then ``steady_J``,
            ``whole_J`` and the values of ``fitting`` are these seconds.
    """

    known: Known
    place_J: IntArray
    group_J: IntArray
    steady_J: FloatArray
    whole_J: FloatArray
    later_J: FloatArray
    fitting: Points
    open_J: IntArray
    weight: int | None = None

    @classmethod
    def of(
        cls,
        known: Known,
        place_J: IntArray,
        least: Points,
        fitting: Points,
        *,
        later_J: FloatArray,
        open_J: IntArray,
        weight: int | None = None,
    ) -> "Unsettled":
        """Candidates by what they take at least per microbatch, and of a batch and a microbatch."""
        counts, fits = counted_seconds(*least[1:], weight), counted_seconds(*fitting[1:], weight)
        return cls(
            known=known,
            place_J=place_J,
            group_J=least[0],
            steady_J=counts[0],
            whole_J=counts[1],
            later_J=later_J,
            fitting=(fitting[0], *fits),
            open_J=open_J,
            weight=weight,
        )

    def narrow(self) -> bool:
        """Leave out those whose seconds are known and what these beat; whether any are left."""
        if not len(self.open_J):
            return False
        found_J, once_J = self.known.seconds(self.place_J[self.open_J])
        done_J = ~np.isnan(found_J)
        if done_J.any():
            at_D = self.open_J[done_J]
            steady_D = found_J[done_J] + self.later_J[at_D]
            fits = self.group_J[at_D], *counted_seconds(steady_D, steady_D + once_J[done_J], self.weight)
            group, first, second = (np.concatenate(pair) for pair in zip(self.fitting, fits, strict=True))
            self.fitting = group, first, second
            self.open_J = self.open_J[~done_J]
        self.open_J = self.open_J[not_beaten(*self._points(), self.fitting)]
        return len(self.open_J) > 0

    def promising(self) -> IntArray:
        """The places of those that no other promises to beat by far."""
        points = self._points()
        first_J = self.open_J[not_beaten(*points, (points[0], points[1] * SLACK, points[2] * SLACK))]
        return self.place_J[first_J]

    def every(self) -> IntArray:
        """The places of all that are left."""
        return self.place_J[self.open_J]

    def _points(self) -> Points:
        return self.group_J[self.open_J], self.steady_J[self.open_J], self.whole_J[self.open_J]


def counted_seconds(steady_J: FloatArray, whole_J: FloatArray, weight: int | None) -> tuple[FloatArray, FloatArray]:
    """The two values that count: seconds per microbatch, and with what comes once per batch; or twice of a batch.

    Args:
        steady_J: Steady seconds.
        whole_J: Steady and boundary seconds.
        weight: If only the least seconds of a batch count, the number of microbatches but one.
    """
    if weight is None:
        return steady_J, whole_J
    # Nothing that comes once per batch takes time away.
    seconds_J = weight * steady_J + np.maximum(whole_J, steady_J)
    return seconds_J, seconds_J


def next_ones(unsettled: Sequence[Unsettled]) -> list[tuple[Known, IntArray]]:
    """What to ask about next of several stages: of every table, which places; each once.

    Args:
        unsettled: Those that have something left.
    """
    few = sum(len(item.open_J) for item in unsettled) <= FEW
    of_tables: dict[int, tuple[Known, list[IntArray]]] = {}
    for item in unsettled:
        places = of_tables.setdefault(id(item.known), (item.known, []))[1]
        places.append(item.every() if few else item.promising())
    return [(known, np.unique(np.concatenate(places))) for known, places in of_tables.values()]


def learn_seconds(model: CostModel, ratios: Ratios, asked: Sequence[tuple[Known, IntArray]]) -> None:
    """Ask for the seconds of candidates with ratios of several tables together, and remember them.

    Args:
        model: The cost model.
        ratios: What may be moved.
        asked: What is known of each table, and which places of it.
    """
    added = [(known, place_N) for known, place_N in asked if all(map(model.adds_copies, known.table.slots))]
    if added:
        _learn_added(model, ratios, added)
    others = [(known, place_N) for known, place_N in asked if not all(map(model.adds_copies, known.table.slots))]
    placed, notes, offload_CO = [], [], ratios.offload_CO
    for known, place_N in others:
        index_N = known.base_B[place_N // len(offload_CO)]
        for shape in np.unique(known.table.shape_K[index_N]).tolist():
            at_M = np.flatnonzero(known.table.shape_K[index_N] == shape)
            candidates = _with(known.table.candidates(index_N[at_M]), offload_CO[place_N[at_M] % len(offload_CO)])
            placed.append((known.table.slots[shape], candidates))
            notes.append((known, place_N[at_M]))
    for (known, place_M), seconds in zip(notes, seconds_of_stages(model, placed), strict=True):
        known.note(place_M, seconds.steady_K, seconds.boundary_K)


def _learn_added(model: CostModel, ratios: Ratios, asked: Sequence[tuple[Known, IntArray]]) -> None:
    """The same where seconds with copies are those without and what copies add, both of which are known of bases."""
    slots: list[StageSlot] = []
    slot_N, stages, floors, before = [], [], [], []
    for known, place_N in asked:
        row_N, combination_N = np.divmod(place_N, len(ratios))
        index_N = known.base_B[row_N]
        shapes, own_N = np.unique(known.table.shape_K[index_N], return_inverse=True)
        slot_N.append(len(slots) + own_N.reshape(-1))
        slots += [known.table.slots[shape] for shape in shapes.tolist()]
        stages.append(_with(known.table.candidates(index_N), ratios.offload_CO[combination_N]))
        floors.append((_floors(known), row_N))
        before.append(_floors(known).before(row_N, ratios.of_kinds(combination_N)[:, :3]))

    def of_bases(name: str) -> FloatArray:
        return np.concatenate([getattr(found, name)[row_N] for found, row_N in floors])

    copies = model.moved_seconds(
        slots, np.concatenate(slot_N), StageCandidates.joined(stages), Beforehand.joined(before)
    )
    exposed_N, giving_N = of_bases("exposed_B"), of_bases("giving_B")
    # Averaging hides otherwise beside copies, and so does giving out parameters if the update waits.
    more_N = np.maximum(copies.reduce_K, -exposed_N) + copies.update_copies_K
    more_N += np.where(copies.is_deferred_K, copies.gather_K - giving_N, 0.0)
    first = 0
    for known, place_M in asked:
        index_M, cut = known.base_B[place_M // len(ratios)], slice(first, first + len(place_M))
        steady_M = known.table.steady_K[index_M] + copies.copies_K[cut]
        known.note(place_M, steady_M, known.table.boundary_K[index_M] + more_N[cut])
        first = cut.stop


def _floors(known: Known) -> CopyFloors:
    if known.floors is None:
        raise ValueError("known.floors = None: nothing was learned about candidates that are asked about")
    return known.floors


def _with(candidates: StageCandidates, offload_JO: FloatArray) -> StageCandidates:
    ratios = {f"{name}_K": offload_JO[:, place] for place, name in enumerate(OFFLOADED)}
    return replace(candidates, offload=OffloadCandidates(**ratios))
