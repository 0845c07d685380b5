"""Step seconds that no pipeline of a family goes below where its stages have to fit.

What stages take at least (:mod:`lightning_mist.tuner.floors`) makes pipelines that take no more than any that there are
(:mod:`lightning_mist.tuner.floor_bound`). Most families are ruled out by that before any of their stages is evaluated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.cost.memory import stage_phases
from lightning_mist.cost.time import copy_rates
from lightning_mist.tuner.floor_bound import floor_bound
from lightning_mist.tuner.floor_family import FloorFamily, StageFloors
from lightning_mist.tuner.floors import Situation, stage_floors
from lightning_mist.tuner.least_runs import PLACES, LeastRuns, joined_runs, slot_runs, slots_of
from lightning_mist.tuner.narrowed import Narrowed, narrowed
from lightning_mist.tuner.placed_runs import Moves, PlacedRuns, placed_runs, with_copies
from lightning_mist.tuner.space import Shape, Space
from lightning_mist.tuner.tables import ROOM

_MORE = 1.04
"""Multiple of the pace asked for up to which floors are worked out: plans near the best are asked about next."""

_AHEAD = 1.5
"""Multiple of the pace asked for up to which runs are worked out: other numbers of stages are compared up to 1.25 times
the best plan's."""

_SPARE = 0.78
"""Share of the pace up to which runs at a place are worked out that is asked for first."""

SlotOf = Callable[[int, int, int, Shape], StageSlot]
"""A slot, by stage, number of stages and of microbatches, and arrangement of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """What is known of a family.

    Attributes:
        bound: Step seconds that no pipeline goes below.
        asked: Seconds up to which it was asked for.
    """

    bound: float
    asked: float

    def may_be_more(self, enough: float) -> bool:
        """Whether a better bound than this may be found, and is of use, if so many seconds are enough."""
        # One below what was asked for is that of the problem, whatever is asked for.
        return self.asked <= self.bound < enough


@dataclass(slots=True, kw_only=True)
class FamilyFloors:
    """Bounds of families under one limit of memory; keeps what it has found.

    Attributes:
        model: The cost model.
        space: The search space.
        slot_of: Makes slots.
        memory_limit: Bytes that a device may use.
        kinds: Kinds of state that may be in host memory.
    """

    model: StageCostModel
    space: Space
    slot_of: SlotOf
    memory_limit: float
    kinds: frozenset[str] = frozenset()
    _found: dict[tuple[frozenset[str], tuple[int, ...], int], _Bound] = field(default_factory=dict)
    _slots: dict[int, tuple[tuple[StageSlot, ...], float]] = field(default_factory=dict)
    _runs: dict[int, LeastRuns] = field(default_factory=dict)
    _placed: dict[tuple[int, str, frozenset[str]], PlacedRuns] = field(default_factory=dict)
    _stages: dict[tuple[frozenset[str], int], dict[Situation, tuple[float, StageFloors]]] = field(default_factory=dict)

    def bound(
        self,
        counts: tuple[int, ...],
        num_microbatches: int,
        below: float,
        deadline: float = np.inf,
        enough: float = np.inf,
    ) -> float:
        """Step seconds that no pipeline of some numbers of stages goes below, as far as they are less than ``below``.

        Args:
            counts: Numbers of stages.
            num_microbatches: Number of microbatches.
            below: Seconds from which on it does not matter; finite.
            deadline: Value of ``perf_counter()`` at which to stop with what has been found.
            enough: Seconds, at most ``below``, that need not be exceeded by much.
        """
        key = self.kinds, counts, num_microbatches
        known = self._found.get(key)
        if known is None or known.may_be_more(min(below, enough)):
            known = self._found[key] = self._solve(counts, num_microbatches, below, deadline, min(below, enough))
        return min(known.bound, below)

    def narrowed(self, counts: Sequence[int], num_microbatches: int, below: float) -> Narrowed:
        """What stages can be of pipelines that take fewer seconds than ``below``.

        Args:
            counts: Numbers of stages.
            num_microbatches: Number of microbatches.
            below: Seconds; finite.
        """
        family = self._family(counts, num_microbatches, below)
        if family is None:
            return Narrowed.nothing(self.space.world_size, self.space.num_layers)
        return narrowed(family, below)

    def _solve(
        self, counts: tuple[int, ...], num_microbatches: int, below: float, deadline: float, enough: float
    ) -> "_Bound":
        family = self._family(counts, num_microbatches, below)
        # A pipeline with a stage that is left out takes at least as long.
        known = below if family is None else floor_bound(family, below, deadline, enough)
        return _Bound(bound=known, asked=enough)

    def _family(self, counts: Sequence[int], num_microbatches: int, below: float) -> FloorFamily | None:
        """The problem of pipelines that take fewer seconds than ``below``, if there can be any."""
        pace = below / num_microbatches * ROOM
        slots, batch_bytes = self._slots_of(num_microbatches)
        runs = self._runs_up_to(slots, num_microbatches, pace)
        if not len(runs):
            return None
        placed = {place: self._at(place, runs, num_microbatches, pace, self.kinds) for place in PLACES}
        limit = self.memory_limit - batch_bytes
        longest, shortest = max(counts), min(counts)

        def situation(stage_index: int, num_stages: int) -> Situation:
            place = "first" if not stage_index else "middle" if stage_index < num_stages - 1 else "last"
            if self.space.schedule == "1f1b":
                return Situation.in_1f1b(place, num_stages - 1 - stage_index, num_microbatches)
            return Situation.of(place, stage_phases(stage_index, num_stages, num_microbatches, self.space.schedule))

        def behind(count: int) -> Situation:
            num_stages = max(count + 2, shortest)
            return situation(num_stages - 1 - count, num_stages)

        tails = [behind(count) for count in range(longest - 1)]
        heads = {count: situation(0, count) for count in counts}
        found = self._stages_of(placed, num_microbatches, limit, pace, [*tails, *heads.values()])
        stages = {item: floors.within(pace) for item, floors in found.items()}
        family = FloorFamily.of(
            (self.space.num_layers, self.space.world_size, num_microbatches),
            [stages[item] for item in tails],
            {count: stages[item] for count, item in heads.items()},
        )
        return family if len(family.counts_C) else None

    def _stages_of(
        self,
        placed: Mapping[str, PlacedRuns],
        num_microbatches: int,
        limit: float,
        pace: float,
        asked: Sequence[Situation],
    ) -> dict[Situation, StageFloors]:
        """What stages take at least in some situations, up to a pace at least."""
        known = self._stages.setdefault((self.kinds, num_microbatches), {})
        for place, runs in placed.items():
            here = dict.fromkeys(item for item in asked if item.place == place)
            new = [item for item in here if item not in known or known[item][0] < pace]
            most = min(runs.pace, pace * _MORE)
            found = stage_floors(runs, limit, new, most)
            known.update({item: (most, floors) for item, floors in zip(new, found, strict=True)})
        return {item: known[item][1] for item in asked}

    def _slots_of(self, num_microbatches: int) -> tuple[tuple[StageSlot, ...], float]:
        """Slots of all arrangements of devices, and bytes of a rank's batches."""
        if num_microbatches not in self._slots:
            slots = slots_of(self.space, self.slot_of, num_microbatches)
            batch_bytes = min((self.model.memory(slot).batch_bytes(slot) for slot in slots), default=0.0)
            self._slots[num_microbatches] = slots, batch_bytes
        return self._slots[num_microbatches]

    def _runs_up_to(self, slots: Sequence[StageSlot], num_microbatches: int, pace: float) -> LeastRuns:
        """Runs of layers on all arrangements of devices up to a pace at least."""
        known = self._runs.get(num_microbatches)
        if known is None or known.pace * ROOM < pace:
            every = [slot_runs(self.model, self.space, slot, pace * _AHEAD) for slot in slots]
            known = self._runs[num_microbatches] = joined_runs(self.model, self.space.num_layers, every)
            self._placed = {key: runs for key, runs in self._placed.items() if key[0] != num_microbatches}
        return known

    def _at(self, place: str, runs: LeastRuns, num_microbatches: int, pace: float, kinds: frozenset[str]) -> PlacedRuns:
        """The runs that are fast enough at a place, with what they may move of some kinds of state."""
        key = num_microbatches, place, kinds
        known = self._placed.get(key)
        if known is not None and known.pace >= pace:
            return known
        if kinds:
            rates = copy_rates(self.model.profile, self.model.cluster)
            moves = Moves(kinds=kinds, rates=rates, num_microbatches=num_microbatches)
            found = with_copies(self._at(place, runs, num_microbatches, pace, frozenset()), runs, moves)
        else:
            found = placed_runs(runs, place, max(pace, min(runs.pace, pace / _SPARE)))
        self._placed[key] = found
        return found
