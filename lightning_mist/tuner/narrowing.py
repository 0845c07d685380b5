"""What stages can be of pipelines that are fast enough, asked again when more is known of what they take.

What stages take at least (:mod:`lightning_mist.tuner.floors`) says which layers and devices they can have before
anything is evaluated (:mod:`lightning_mist.tuner.narrowed`). When candidates' bytes are known, much more is known of
what those take at least that have to move something to fit (:mod:`lightning_mist.cost.offload_floors`): often so much
that none of them can be part of such a pipeline, and no more of their seconds has to be worked out.

Array axes
    N  numbers of devices, from 0 to all
    L  numbers of layers, from 0 to all
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_mist.cost.compile import BoolArray
from lightning_mist.tuner.floor_family import FloorFamily, StageFloors
from lightning_mist.tuner.moved_settled import Unsettled
from lightning_mist.tuner.narrowed import Narrowed, narrowed
from lightning_mist.tuner.places import FrontierKey
from lightning_mist.tuner.problem import places_behind


@dataclass(slots=True, kw_only=True)
class Narrowing:
    """What the stages of a family can be, at first without anything evaluated.

    Attributes:
        sizes: Layers and devices to deal out, and microbatches per batch.
        below: Seconds that pipelines have to be faster than.
        found: What the stages can be.
        counts: Numbers of stages that are of interest.
        keys: What tells a stage's choices from those of others, by stage and number of stages.
        is_narrowed: Whether anything was found out since.
    """

    sizes: tuple[int, int, int]
    below: float
    found: Narrowed
    counts: tuple[int, ...] = field(init=False)
    keys: dict[tuple[int, int], FrontierKey] = field(default_factory=dict)
    is_narrowed: bool = False

    def __post_init__(self) -> None:
        """Keep the numbers of stages: others are ruled out later, but their stages are asked about."""
        self.counts = self.found.counts

    @property
    def places(self) -> list[tuple[int, int]]:
        """Every stage, and the number of stages."""
        return [*places_behind(self.counts), *((0, count) for count in self.counts)]

    def leave_out(
        self,
        tables: Sequence[Sequence[FrontierKey]],
        others: Callable[[FrontierKey], StageFloors],
        every: Sequence[Unsettled],
    ) -> None:
        """Find out once more what stages can be, and leave out what they cannot.

        Args:
            tables: The keys of the stages of every table.
            others: What other stages take at least.
            every: What is known of the stages of every table.
        """
        pairs = list(zip(tables, every, strict=True))
        floors = {key: item for keys, own in pairs for key, item in zip(keys, own.floors(len(keys)), strict=True)}
        self._again(lambda key: floors[key] if key in floors else others(key))
        left = self.left(floors)
        for keys, own in pairs:
            own.leave_out(np.stack([left[key] for key in keys]), self.found.slowest)
        self.is_narrowed = True

    def left(self, keys: Iterable[FrontierKey]) -> dict[FrontierKey, BoolArray]:
        """Devices and layers that stages can have, by key.

        Args:
            keys: Whose.
        """
        found = {key: np.zeros(self.found.tails_BNL.shape[1:], dtype=bool) for key in keys}
        for place, key in self.keys.items():
            if key in found:
                found[key] |= self.found.of(*place)
        return found

    def _again(self, floors_of: Callable[[FrontierKey], StageFloors]) -> None:
        num_layers, num_devices, _ = self.sizes
        slowest = self.found.slowest
        tails = [floors_of(self.keys[place]).within(slowest) for place in places_behind(self.counts)]
        heads = {count: floors_of(self.keys[0, count]).within(slowest) for count in self.counts}
        family = FloorFamily.of(self.sizes, tails, heads)
        is_empty = not len(family.counts_C)
        self.found = Narrowed.nothing(num_devices, num_layers) if is_empty else narrowed(family, self.below)
