"""Runs of layers that are known, and what is known of them at each place, which neither limits nor batches change."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.tuner.least_runs import LeastRuns, SlotRuns, joined_runs, slot_runs
from lightning_mist.tuner.placed_runs import Moves, PlacedRuns, placed_runs, with_copies
from lightning_mist.tuner.space import Space
from lightning_mist.tuner.tables import ROOM

_AHEAD = 1.5
"""Multiple of the pace asked for up to which runs are worked out: other numbers of stages are compared up to 1.25 times
the best plan's, and smaller batches, whose runs are the same, take longer per microbatch."""

_MOST = 1 << 19
"""Runs that are kept in all, put together; with what is known of them a kilobyte or two each."""

_SLOTS = 512
"""Arrangements of devices whose runs are kept."""

_PACES = 2
"""Paces for which runs at a place are kept: for the best plan, and to compare with."""

_SPARE = 0.78
"""Share of the pace that is known below which runs are worth leaving out."""


@dataclass(slots=True, kw_only=True)
class KnownRuns:
    """Runs of layers, and what is known of them at each place; it grows.

    Attributes:
        runs: The runs.
        placed: Those at every place, by what may be moved, of the last few paces.
    """

    runs: LeastRuns
    placed: dict[tuple[str, frozenset[str] | None], tuple[PlacedRuns, ...]] = field(default_factory=dict)

    def at(self, place: str, moves: Moves | None, pace: float) -> PlacedRuns:
        """The runs that are fast enough at a place.

        Args:
            place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
            moves: What they may move; of every number of microbatches at the same rates. ``None`` for what they are
                before they free anything.
            pace: The most seconds of a microbatch.
        """
        key = place, None if moves is None else moves.kinds
        every = self.placed.get(key, ())
        known = min((item for item in every if item.pace >= pace), key=lambda item: item.pace, default=None)
        if known is not None and _SPARE * known.pace <= pace:
            return known
        if moves is not None:
            found = with_copies(self.at(place, None, pace), self.runs, moves)
        elif known is not None:
            found = known.up_to(pace / _SPARE)
        else:
            found = placed_runs(self.runs, place, max(pace, min(self.runs.pace, pace / _SPARE)))
        self.placed[key] = (*every, found)[-_PACES:]
        return found


@dataclass(slots=True, kw_only=True)
class AllRuns:
    """Runs of layers by all that they depend on; those asked for longest ago are forgotten.

    Attributes:
        of: The runs.
        of_slots: Those of every arrangement of devices, of which they are put together.
    """

    of: dict[Hashable, KnownRuns] = field(default_factory=dict)
    of_slots: dict[Hashable, SlotRuns] = field(default_factory=dict)

    def up_to(
        self,
        model: StageCostModel,
        space: Space,
        slots: Mapping[Hashable, StageSlot],
        pace: float,
    ) -> KnownRuns:
        """Runs of some arrangements of devices up to a pace at least.

        Args:
            model: The cost model.
            space: The search space.
            slots: A slot of every arrangement, by all that its runs depend on but the pace.
            pace: Seconds of a microbatch.
        """
        key = tuple(slots)
        known = self.of.pop(key, None)
        if known is None or known.runs.pace * ROOM < pace:
            every = self._slots_up_to(model, space, slots, pace)
            known = KnownRuns(runs=joined_runs(model, space.num_layers, every))
        self.of[key] = known
        count = sum(len(item.runs) for item in self.of.values())
        while len(self.of) > 1 and count > _MOST:
            count -= len(self.of.pop(next(iter(self.of))).runs)
        while len(self.of_slots) > max(_SLOTS, len(slots)):
            del self.of_slots[next(iter(self.of_slots))]
        return known

    def _slots_up_to(
        self, model: StageCostModel, space: Space, slots: Mapping[Hashable, StageSlot], pace: float
    ) -> list[SlotRuns]:
        for key, slot in slots.items():
            runs = self.of_slots.pop(key, None)
            if runs is None or runs.pace * ROOM < pace:
                runs = slot_runs(model, space, slot, pace * _AHEAD)
            self.of_slots[key] = runs
        return [self.of_slots[key] for key in slots]
