"""Lower bounds of the stages in one part of a cluster as choices, and what their neighbours' parts add to them.

Lower bounds of ranges (:mod:`lightning_mist.tuner.bounds.range_bounds`) receive from whichever part that takes least.
Once it is known in which parts the stages next to one lie, what it takes beyond that counts too.

Array axes
    N  numbers of devices, from 0 to all
    S  slots, one for every arrangement of devices
    K  choices
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.time import copy_rates, interference_of
from lightning_mist.plan import OFFLOADED
from lightning_mist.tuner.bounds.range_bounds import (
    Position,
    RangeBounds,
    SlotOf,
    range_bounds,
    received,
    slots_of,
)
from lightning_mist.tuner.bounds.stage_bounds import (
    PositionBounds,
    Setting,
    StageBounds,
    in_flight,
    position_bounds,
    stage_bounds,
)
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, FRONT, SlotChoices
from lightning_mist.tuner.space import ANYWHERE, Space

MOST_KEPT = 1 << 15
"""Ranges of a number of microbatches that are kept for later questions, of a kilobyte each. Where there are more,
stages have many devices and layers, and few such pipelines are asked about again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamBounds:
    """Of stages in one part, by the parts of those next to them.

    Attributes:
        arrivals_S: Seconds of receiving what comes from the front beyond the least, from each part.
        returns_S: The same from behind.
    """

    part: int
    size: int
    devices_S: IntArray
    arrivals_S: tuple[FloatArray, ...]
    returns_S: tuple[FloatArray, ...]

    @classmethod
    def of(
        cls, model: StageCostModel, slots: Sequence[StageSlot], part: int, num_parts: int, num_layers: int
    ) -> "SeamBounds":
        """Those of stages in a part, with any of its arrangements of devices.

        Args:
            slots: A slot for each of them.
        """
        each = [
            [received(model, replace(slot, parts=(other, part, other)), num_layers) for other in range(num_parts)]
            for slot in slots
        ]
        received_SPW = np.array(each).reshape(len(slots), num_parts, 2)
        beyond_SPW = received_SPW - received_SPW.min(axis=1, keepdims=True)
        return cls(
            part=part,
            size=model.cluster.world_size,
            devices_S=np.array([slot.devices for slot in slots], dtype=np.int64),
            arrivals_S=tuple(beyond_SPW[:, other, 0] for other in range(num_parts)),
            returns_S=tuple(beyond_SPW[:, other, 1] for other in range(num_parts)),
        )

    def at(self, choices: SlotChoices, front: int | None, behind: int | None, slowest: float) -> Iterator[SlotChoices]:
        """Choices for every way in which the stages next to one may lie.

        Args:
            choices: Lower bounds wherever these lie.
            front: The part that comes before this one; this one, if there is none; ``None`` of a first stage.
            behind: The same behind, ``None`` of a last stage.
            slowest: The most steady seconds.
        """
        sides = (front, FRONT), (behind, BEHIND)
        for seams in range(FRONT + BEHIND + 1):
            if any(seams & bit and other in (None, self.part) for other, bit in sides):
                continue
            # Without a stage of its part next to it one has all its devices.
            is_alone = all(other is None or seams & bit for other, bit in sides)
            fits_K = (choices.devices_K == self.size) == is_alone
            from_front = None if front is None else front if seams & FRONT else self.part
            from_behind = None if behind is None else behind if seams & BEHIND else self.part
            seconds_K = choices.steady_K + self._beyond(from_front, from_behind)[choices.devices_K]
            at_J = np.flatnonzero(fits_K & (seconds_K <= slowest))
            yield _choices(
                choices.layers_K[at_J],
                choices.devices_K[at_J],
                seconds_K[at_J],
                choices.boundary_K[at_J],
                part=self.part,
                seams=seams,
            )

    def _beyond(self, front: int | None, behind: int | None) -> FloatArray:
        """Seconds of receiving beyond the least, by devices, with axis ``N``."""
        beyond_S = np.zeros(len(self.devices_S))
        if front is not None:
            beyond_S = beyond_S + self.arrivals_S[front]
        if behind is not None:
            beyond_S = beyond_S + self.returns_S[behind]
        beyond_N = np.full(self.size + 1, np.inf)
        np.minimum.at(beyond_N, self.devices_S, beyond_S)
        return beyond_N


@dataclass(slots=True, kw_only=True)
class _Known:
    """Lower bounds of the stages of one number of microbatches, up to a bottleneck time, beside batches."""

    bottleneck: float
    memory_limit: float
    ranges: RangeBounds
    setting: Setting
    positions: dict[Position, PositionBounds] = field(default_factory=dict)
    stages: dict[tuple[Position, int], StageBounds] = field(default_factory=dict)

    def stage(self, position: Position, others: int) -> StageBounds:
        """Lower bounds of stages at a position with so many other microbatches in flight."""
        key = position, others
        if key not in self.stages:
            self.stages[key] = stage_bounds(
                self._at(position),
                self.memory_limit,
                others,
                num_microbatches=self.setting.num_microbatches,
                bottleneck=self.bottleneck,
            )
        return self.stages[key]

    def _at(self, position: Position) -> PositionBounds:
        if position not in self.positions:
            if len(self.ranges) > MOST_KEPT:
                self.positions.clear()
            self.positions[position] = position_bounds(self.ranges, position, self.setting, self.bottleneck)
        return self.positions[position]


@dataclass(slots=True, kw_only=True)
class PartBounds:
    """Lower bounds of stages on devices that are alike, under one memory limit; keeps what it has found.

    Attributes:
        memory_limit: Bytes that a device may use.
        kinds: Kinds of state that may be offloaded.
        part: Which part of the cluster these devices are.
        num_parts: How many parts the cluster has.
    """

    model: StageCostModel
    space: Space
    slot_of: SlotOf
    memory_limit: float
    kinds: frozenset[str] = frozenset()
    part: int = 0
    num_parts: int = 1
    _ranges: dict[int, tuple[float, RangeBounds]] = field(default_factory=dict)
    _known: dict[tuple[frozenset[str], int], _Known] = field(default_factory=dict)
    _seams: dict[int, SeamBounds] = field(default_factory=dict)

    def share(self, like: "PartBounds") -> None:
        """Share what others that differ in their memory limit alone have found, as far as it does not depend on it."""
        self._ranges, self._seams = like._ranges, like._seams
        if self.memory_limit == like.memory_limit:
            self._known = like._known

    def choices(self, num_microbatches: int, bottleneck: float) -> Callable[[int, int], SlotChoices]:
        """By stage and number of stages, lower bounds up to a bottleneck time as choices; equal ones are the same."""
        known = self._known.get((self.kinds, num_microbatches))
        if known is None or known.bottleneck < bottleneck:
            for key in [key for key, item in self._known.items() if len(item.ranges) > MOST_KEPT]:
                del self._known[key]
            known = self._known[self.kinds, num_microbatches] = self._prepared(num_microbatches, bottleneck)
        made: dict[tuple[Position, int], SlotChoices] = {}

        def choices(stage_index: int, num_stages: int) -> SlotChoices:
            position: Position = "first" if not stage_index else "middle" if stage_index < num_stages - 1 else "last"
            others = in_flight(self.space.schedule, num_stages - 1 - stage_index, num_microbatches)
            if (position, others) not in made:
                some = known.stage(position, others).within(bottleneck)
                boundary_V = np.maximum(some.reach_V - some.steady_V, 0.0)
                made[position, others] = _choices(
                    some.layers_V, some.devices_V, some.steady_V, boundary_V, part=self.part, seams=ANY_SEAMS
                )
            return made[position, others]

        return choices

    def seams(self, num_microbatches: int) -> SeamBounds:
        """How much longer stages take that receive from given parts."""
        if num_microbatches not in self._seams:
            slots = slots_of(self.space, self.slot_of, num_microbatches, (self.part,) * 3)
            self._seams[num_microbatches] = SeamBounds.of(
                self.model, slots, self.part, self.num_parts, self.space.num_layers
            )
        return self._seams[num_microbatches]

    def _prepared(self, num_microbatches: int, bottleneck: float) -> _Known:
        neighbours = [(other, self.part, other) for other in range(self.num_parts)] if self.num_parts > 1 else [()]
        own = (self.part,) * len(neighbours[0])
        slots, setting = slots_of(self.space, self.slot_of, num_microbatches, own), self._setting(num_microbatches)
        up_to, ranges = self._ranges.get(num_microbatches, (0.0, None))
        if ranges is None or up_to < bottleneck:
            ranges = range_bounds(self.model, self.space, slots, bottleneck, neighbours)
            if len(ranges) <= MOST_KEPT:
                self._ranges[num_microbatches] = bottleneck, ranges
        batch_bytes = min((self.model.memory(slot).batch_bytes(slot) for slot in slots), default=0.0)
        limit = self.memory_limit - batch_bytes
        return _Known(bottleneck=bottleneck, memory_limit=limit, ranges=ranges, setting=setting)

    def _setting(self, num_microbatches: int) -> Setting:
        machine = self.model.profile, self.model.cluster
        return Setting(
            kinds=self.kinds,
            rates=copy_rates(*machine) if self.kinds else None,
            interference=interference_of(*machine),
            num_microbatches=num_microbatches,
            least_ratio=min(self.space.offload_ratios, default=0.0),
        )


def _choices(
    layers_K: IntArray, devices_K: IntArray, steady_K: FloatArray, boundary_K: FloatArray, *, part: int, seams: int
) -> SlotChoices:
    """Lower bounds as choices that may have any layers, on devices of a part."""
    zero_K = np.zeros(len(layers_K), dtype=np.int64)
    return SlotChoices(
        start_K=zero_K + ANYWHERE,
        layers_K=layers_K,
        devices_K=devices_K,
        part_K=zero_K + part,
        seams_K=zero_K + seams,
        steady_K=steady_K,
        boundary_K=boundary_K,
        peak_K=np.zeros(len(layers_K)),
        checkpointed_K=zero_K,
        zero_stage_K=zero_K,
        shard_K=zero_K,
        tensor_K=zero_K + 1,
        sequence_K=zero_K,
        selective_K=zero_K,
        offload_KO=np.zeros((len(layers_K), len(OFFLOADED))),
    )
