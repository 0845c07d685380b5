"""Step seconds that no pipeline of a family goes below where its stages have to fit.

What stages take at least (:mod:`lightning_mist.tuner.floors`) makes pipelines that take no more than any that there are
(:mod:`lightning_mist.tuner.floor_bound`). Most families are ruled out by that before any of their stages is evaluated.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.cost.memory import stage_phases
from lightning_mist.cost.time import copy_rates
from lightning_mist.tuner.floor_bound import floor_bound
from lightning_mist.tuner.floor_family import FloorFamily, StageFloors
from lightning_mist.tuner.floors import Situation, stage_floors
from lightning_mist.tuner.known_runs import AllRuns
from lightning_mist.tuner.least_runs import PLACES, slots_of
from lightning_mist.tuner.narrowed import Narrowed, narrowed
from lightning_mist.tuner.pieces import piece_key
from lightning_mist.tuner.placed_runs import Moves, PlacedRuns
from lightning_mist.tuner.space import Shape, Space
from lightning_mist.tuner.tables import ROOM

_MORE = 1.04
"""Multiple of the pace asked for up to which floors are worked out: plans near the best are asked about next."""

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
        runs: Runs of layers, which depend neither on limits nor on the size of batches.
        kinds: Kinds of state that may be in host memory.
    """

    model: StageCostModel
    space: Space
    slot_of: SlotOf
    memory_limit: float
    runs: AllRuns
    kinds: frozenset[str] = frozenset()
    _found: dict[tuple[frozenset[str], tuple[int, ...], int], _Bound] = field(default_factory=dict)
    _arranged: dict[int, tuple[dict[Hashable, StageSlot], float]] = field(default_factory=dict)
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
        slots, batch_bytes = self._slots(num_microbatches)
        known = self.runs.up_to(self.model, self.space, slots, pace)
        if not len(known.runs):
            return None
        moves = None
        if self.kinds:
            rates = copy_rates(self.model.profile, self.model.cluster)
            moves = Moves(kinds=self.kinds, rates=rates, num_microbatches=num_microbatches)
        placed = {place: known.at(place, moves, pace) for place in PLACES}
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

    def _slots(self, num_microbatches: int) -> tuple[dict[Hashable, StageSlot], float]:
        """Slots of all arrangements of devices by all that their runs depend on, and bytes of a rank's batches."""
        if num_microbatches not in self._arranged:
            slots = slots_of(self.space, self.slot_of, num_microbatches)
            batch_bytes = min((self.model.memory(slot).batch_bytes(slot) for slot in slots), default=0.0)
            of_keys: dict[Hashable, StageSlot] = {piece_key(self.model, slot, self.space, ()): slot for slot in slots}
            self._arranged[num_microbatches] = of_keys, batch_bytes
        return self._arranged[num_microbatches]
