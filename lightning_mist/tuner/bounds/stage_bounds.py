"""Lower bounds of a stage under a memory limit: a fractional knapsack over what to offload, by weights of channels.

What is counted of its memory is what is there where a backward begins: parameters, optimizer state and gradients, what
the microbatches in flight keep, and the temporaries of its first region. What does not fit has to be offloaded in the
cheapest way that there could be. To free a byte

* by *activations*, a microbatch's are copied away beside a forward and back beside a backward; as many are freed as
  microbatches are in flight, but for the last two layers' of the own one. Those of the last layer of a stage without
  the tail are copied while nothing else is done;
* by *gradients*, they are fetched and written back in every backward, but for the first unit's, which nobody waits for;
* by *parameters*, they are fetched in every forward and backward, but for the two units that are there already.

What is received of a microbatch stays as long as that is in flight. Of all state that may be offloaded nothing has to
stay; but two buffers on the device, ``2 / n`` of what ``n`` units offload, free nothing of what is copied, so that no
more parameters are freed than are fetched. Copies of optimizer state count for nothing within a microbatch.

Loads take at least their sum by dual weights of channels (:mod:`lightning_mist.cost.time.overlap`), those of a forward
and those of a backward each by weights of its own; or those of a forward do, and a backward what it takes alone. The
smaller of the weights on one node and on several hold on both.

Lower bounds of ranges receive from whichever part of a cluster that takes least. Once it is known in which parts the
stages next to one lie, what it takes beyond that counts too (:class:`SeamBounds`).

Array axes
    K  ranges (see :mod:`lightning_mist.tuner.bounds.range_bounds`), or choices
    J  ranges that have to offload something
    S  stages: of every number of devices and layers, at every position, or slots for every arrangement of devices
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.time import (
    COMPUTE,
    CopyRates,
    copy_rates,
    interference_of,
    weights_of_passes,
)
from lightning_mist.hardware import Interference
from lightning_mist.plan import UPDATED_KINDS, ScheduleName
from lightning_mist.tuner.bounds.range_bounds import (
    POSITIONS,
    Position,
    RangeBounds,
    SlotOf,
    buffered_share,
    range_bounds,
    received,
    slots_of,
)
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, FRONT, SlotChoices
from lightning_mist.tuner.space import Space

_TOLD_APART = 3
"""Leading binary digits of numbers of microbatches that are told apart."""

_NEXT_TO_NOTHING = 1e-9
"""Share of the bytes that have to be freed which is less than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBounds:
    """How many bytes ranges can free at most by offloading, and what that takes at least.

    Attributes:
        others_K: Bytes of activations of every microbatch in flight but the own one.
        own_K: Bytes of activations of the own one.
        activations_by_weights_K: Weighted seconds of copying all activations of a microbatch.
        gradients_by_weights_K: Weighted seconds per byte of gradients that is freed.
        parameters_by_weights_K: Weighted seconds per byte of parameters that is freed.
        least_ratio: The least ratio of activations that are offloaded at all.
    """

    others_K: FloatArray
    own_K: FloatArray
    gradients_K: FloatArray
    parameters_K: FloatArray
    activations_by_weights_K: FloatArray
    gradients_by_weights_K: FloatArray
    parameters_by_weights_K: FloatArray
    least_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBounds:
    """Ranges at one position that are fast enough there with nothing offloaded, and what no memory limit changes.

    Attributes:
        begins_S: The first range of each pair of layers and devices.
        reach_S: Steady and boundary seconds of each pair together, whatever is offloaded.
        steady_K: Seconds of a microbatch, with its transfers, with nothing offloaded.
        needed_K: Bytes around a backward without gradients of which nobody but the own microbatch is in flight, and
            without what offloading optimizer state frees.
        kept_K: Bytes that every other microbatch in flight adds, what is received of it included.
        loads_by_weights_K: Weighted seconds of what is not copied.
        offload: What may be offloaded, if anything but optimizer state may.
    """

    layers_S: IntArray
    devices_S: IntArray
    begins_S: IntArray
    reach_S: FloatArray
    pair_K: IntArray
    steady_K: FloatArray
    needed_K: FloatArray
    gradients_K: FloatArray
    kept_K: FloatArray
    loads_by_weights_K: FloatArray
    offload: OffloadBounds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What offloading depends on beside the ranges.

    Attributes:
        kinds: Kinds of state that may be offloaded.
        rates: How fast devices copy; ``None`` if nothing may be offloaded.
        interference: How channels slow each other down; ``None`` where they take turns.
        least_ratio: The least ratio of anything that is offloaded at all.
    """

    kinds: frozenset[str]
    rates: CopyRates | None
    interference: Interference | None
    num_microbatches: int
    least_ratio: float


def in_flight(schedule: ScheduleName, behind: int, num_microbatches: int) -> int:
    """Other microbatches in flight around the backward that finds most, at least."""
    # The first backward finds no gradients; what it let go of, another forward takes the place of, if there is one.
    most = max(0, num_microbatches - 2)
    others = most if schedule == "gpipe" else min(behind, most)
    # Rounded down, so that few numbers are told apart: what takes at least so long with fewer does with more.
    step = 1 << max(0, others.bit_length() - _TOLD_APART)
    return others // step * step


def position_bounds(ranges: RangeBounds, position: Position, setting: Setting, bottleneck: float) -> PositionBounds:
    """Prepare the lower bounds of stages at a position, whatever memory they have.

    Args:
        setting: What may be offloaded, and how fast.
        bottleneck: The most steady seconds of a stage.
    """
    at = POSITIONS.index(position)
    alone_SK = ranges.forward_SK + ranges.backward_SK + ranges.transfer_SK + ranges.exposed_SK
    alone_K = alone_SK[at, at_K := np.flatnonzero(alone_SK[at] <= bottleneck)]
    ranges = ranges.take(at_K)
    forward_K, backward_K, transfer_K = ranges.forward_SK[at], ranges.backward_SK[at], ranges.transfer_SK[at]
    weights = _weights(setting.interference)
    forward_weights, backward_weights = weights
    loads_by_weights_K = (
        np.outer(forward_weights[:, COMPUTE], forward_K)
        + np.outer(backward_weights[:, COMPUTE], backward_K)
        + transfer_K
    )
    # Copies beside a backward never make it faster.
    loads_by_weights_K += np.outer(~backward_weights.any(axis=1), backward_K + ranges.exposed_SK[at])
    optimizer_K = ranges.optimizer_SK[at] * ("optimizer" not in setting.kinds)
    pair_K = ranges.devices_K * (1 + int(ranges.layers_K.max(initial=0))) + ranges.layers_K
    begins_S = np.flatnonzero(np.diff(pair_K, prepend=-1))
    is_deferred = not setting.kinds.isdisjoint(UPDATED_KINDS)
    reach_K = alone_K + (ranges.deferred_SK if is_deferred else ranges.once_SK)[at]
    can_offload = setting.rates is not None and bool(setting.kinds - {"optimizer"})
    return PositionBounds(
        layers_S=ranges.layers_K[begins_S],
        devices_S=ranges.devices_K[begins_S],
        begins_S=begins_S,
        reach_S=np.minimum.reduceat(reach_K, begins_S) if len(reach_K) else np.empty(0),
        pair_K=np.repeat(np.arange(len(begins_S)), np.diff(begins_S, append=len(ranges))),
        steady_K=np.maximum(alone_K, loads_by_weights_K.max(axis=0, initial=0.0)),
        needed_K=ranges.always_SK[at]
        + ranges.received_SK[at]
        + ranges.parameters_SK[at]
        + ranges.activations_K
        + optimizer_K,
        gradients_K=ranges.gradients_SK[at],
        kept_K=ranges.kept_K + ranges.received_SK[at],
        loads_by_weights_K=loads_by_weights_K,
        offload=_offload_bounds(ranges, position, setting, weights) if can_offload else None,
    )


def _weights(interference: Interference | None) -> tuple[FloatArray, FloatArray]:
    """Dual weights of forwards and backwards, wherever ranks with the same parameters are; axes weights, channel."""
    near, far = (weights_of_passes(interference, across_nodes) for across_nodes in (False, True))
    return np.minimum(near[0], far[0]), np.minimum(near[1], far[1])


def _offload_bounds(
    ranges: RangeBounds, position: Position, setting: Setting, weights: tuple[FloatArray, FloatArray]
) -> OffloadBounds:
    assert setting.rates is not None
    to_device, to_host = 1 / setting.rates.to_device, 1 / setting.rates.to_host
    at, may, moves = POSITIONS.index(position), setting.kinds.__contains__, not setting.kinds <= {*UPDATED_KINDS}
    free_K = 1 - buffered_share(ranges.layers_K)[at]
    (_, _, forward_in, forward_out), (_, _, backward_in, backward_out) = (each.T for each in weights)
    # Behind the last layer of a stage without the tail nothing is computed.
    alone_K = np.minimum(ranges.top_K, ranges.activations_K) * (position != "last")
    own_K = np.maximum(ranges.activations_K - (0.0 if position == "last" else ranges.top_two_K), 0.0)
    if may("checkpoints"):
        # Each layer's may leave without the others', the least of them too: a byte frees one in every microbatch.
        alone_K, own_K = np.zeros_like(alone_K), ranges.activations_K
    told_K = (ranges.is_told_K & (free_K > 0)).astype(np.float64)
    # What frees nothing has no price. Of ``n`` units' gradients one part at most is not waited for, and two stay.
    each_K = told_K / np.where(free_K > 0, free_K, 1.0)
    fetched = to_device * (setting.num_microbatches > 1)
    around = forward_out * to_host + backward_in * to_device
    copied_K = ranges.is_told_K * (ranges.activations_K - alone_K)
    return OffloadBounds(
        others_K=ranges.activations_K * moves,
        own_K=own_K * moves,
        gradients_K=ranges.gradients_SK[at] * (may("gradients") and setting.num_microbatches > 1),
        parameters_K=ranges.parameters_SK[at] * may("parameters"),
        activations_by_weights_K=np.outer(around, copied_K) + (to_host + to_device) * ranges.is_told_K * alone_K,
        gradients_by_weights_K=np.outer(fetched * backward_in, each_K)
        + np.outer(to_host * backward_out, (each_K + told_K) / 2),
        parameters_by_weights_K=np.outer(to_device * (forward_in + backward_in), told_K),
        least_ratio=setting.least_ratio * (not may("checkpoints")),
    )


def stage_bounds(
    found: PositionBounds, memory_limit: float, others: int, *, num_microbatches: int, bottleneck: float
) -> SlotChoices:
    """Lower bounds of stages at a position with some microbatches in flight, up to a bottleneck time, as choices.

    Args:
        found: What has been prepared for the position.
        others: Other microbatches in flight around a backward.
        num_microbatches: With several there are gradients already.
        bottleneck: The most steady seconds of a stage that are of interest.
    """
    excess_K = found.needed_K - memory_limit + others * found.kept_K + (num_microbatches > 1) * found.gradients_K
    seconds_K = np.where(excess_K <= 0, found.steady_K, np.inf)
    steady_S = np.minimum.reduceat(seconds_K, found.begins_S) if len(seconds_K) else np.empty(0)
    if found.offload is not None:
        # Offloading is of use only to what is faster than what fits.
        at_J = np.flatnonzero(
            (excess_K > 0) & (found.steady_K <= bottleneck) & (found.steady_K < steady_S[found.pair_K])
        )
        # By one pair of weights alone most of it is already known to be too slow.
        for weights in (slice(0, 1), slice(None)):
            seconds_J = _offloaded(found, found.offload, excess_K[at_J], others, (weights, at_J))
            fast_J = (seconds_J <= bottleneck) & (seconds_J < steady_S[found.pair_K[at_J]])
            at_J, seconds_J = at_J[fast_J], seconds_J[fast_J]
        np.minimum.at(steady_S, found.pair_K[at_J], seconds_J)
    at_K = np.flatnonzero((steady_S <= bottleneck) & (steady_S < np.inf))
    steady_K = steady_S[at_K]
    boundary_K = np.maximum(found.reach_S[at_K] - steady_K, 0.0)
    return SlotChoices.anywhere(found.layers_S[at_K], found.devices_S[at_K], steady_K, boundary_K)


def _offloaded(
    found: PositionBounds,
    offload: OffloadBounds,
    excess_J: FloatArray,
    others: int,
    at_by_weights_J: tuple[slice, IntArray],
) -> FloatArray:
    """Lower bounds of ranges that have to free some bytes; infinite if offloading everything is too little.

    Args:
        others: Other microbatches in flight.
        at_by_weights_J: Which pairs of weights count, and which ranges these are.
    """
    at_J = at_by_weights_J[1]
    activations_J = others * offload.others_K[at_J] + offload.own_K[at_J]
    gradients_J, parameters_J = offload.gradients_K[at_J], offload.parameters_K[at_J]
    activations_by_weights_J = offload.activations_by_weights_K[at_by_weights_J]
    by_activations_by_weights_J = activations_by_weights_J / np.where(activations_J > 0, activations_J, np.inf)
    states = [
        (offload.gradients_by_weights_K[at_by_weights_J], gradients_J),
        (offload.parameters_by_weights_K[at_by_weights_J], parameters_J),
    ]

    def seconds(copies_by_weights_J: FloatArray, freed_J: FloatArray) -> FloatArray:
        found_J = np.maximum(
            (found.loads_by_weights_K[at_by_weights_J] + copies_by_weights_J).max(axis=0), found.steady_K[at_J]
        )
        return np.where(freed_J >= excess_J * (1 - _NEXT_TO_NOTHING), found_J, np.inf)

    def cheapest(kinds: Sequence[tuple[FloatArray, FloatArray]], freed_J: FloatArray) -> FloatArray:
        return knapsack(kinds, np.minimum(excess_J, freed_J))

    # Either activations stay, or as much of them is copied as by the least ratio.
    freed_J = gradients_J + parameters_J
    without_J = seconds(cheapest(states, freed_J), freed_J)
    copies_by_weights_J = cheapest([(by_activations_by_weights_J, activations_J), *states], freed_J + activations_J)
    with_J = seconds(
        np.maximum(copies_by_weights_J, offload.least_ratio * activations_by_weights_J), freed_J + activations_J
    )
    return np.minimum(without_J, with_J)


def knapsack(kinds: Sequence[tuple[FloatArray, FloatArray]], wanted_J: FloatArray) -> FloatArray:
    """Least weighted seconds in which some bytes are freed: the value of a fractional knapsack, by its dual.

    The cheapest way to free ``e`` bytes, of kinds ``i`` that free at most ``f_i`` at ``p_i`` seconds per byte, takes

        max_j [p_j e - sum_i f_i max(0, p_j - p_i)].

    Args:
        kinds: Seconds per byte, with axes weights and ``J``, and bytes that can be freed at most, of every kind.
        wanted_J: Bytes to free, no more than all kinds together can.
    """
    found_by_weights_J = np.zeros(kinds[0][0].shape)
    for price_by_weights_J, _ in kinds:
        way_by_weights_J = price_by_weights_J * wanted_J
        for other_by_weights_J, freed_J in kinds:
            if other_by_weights_J is not price_by_weights_J:
                way_by_weights_J -= freed_J * np.maximum(price_by_weights_J - other_by_weights_J, 0.0)
        np.maximum(found_by_weights_J, way_by_weights_J, out=found_by_weights_J)
    return found_by_weights_J


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
        received_S = np.array(each).reshape(len(slots), num_parts, 2)
        beyond_S = received_S - received_S.min(axis=1, keepdims=True)
        return cls(
            part=part,
            size=model.cluster.world_size,
            devices_S=np.array([slot.devices for slot in slots], dtype=np.int64),
            arrivals_S=tuple(beyond_S[:, other, 0] for other in range(num_parts)),
            returns_S=tuple(beyond_S[:, other, 1] for other in range(num_parts)),
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
            yield replace(choices.take(at_J), steady_K=seconds_K[at_J]).placed(self.part, seams)

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
    stages: dict[tuple[Position, int], SlotChoices] = field(default_factory=dict)

    def stage(self, position: Position, others: int) -> SlotChoices:
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
        part: Which part of the cluster these devices are.
        num_parts: How many parts the cluster has.
    """

    model: StageCostModel
    space: Space
    slot_of: SlotOf
    memory_limit: float
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

    def choices(
        self, num_microbatches: int, bottleneck: float, kinds: frozenset[str]
    ) -> Callable[[int, int], SlotChoices]:
        """By stage and number of stages, lower bounds up to a bottleneck time as choices; equal ones are the same.

        Args:
            kinds: Kinds of state that may be offloaded.
        """
        known = self._known.get((kinds, num_microbatches))
        if known is None or known.bottleneck < bottleneck:
            for key in [key for key, item in self._known.items() if len(item.ranges) > MOST_KEPT]:
                del self._known[key]
            known = self._known[kinds, num_microbatches] = self._prepared(num_microbatches, bottleneck, kinds)
        made: dict[tuple[Position, int], SlotChoices] = {}

        def choices(stage_index: int, num_stages: int) -> SlotChoices:
            position: Position = "first" if not stage_index else "middle" if stage_index < num_stages - 1 else "last"
            others = in_flight(self.space.schedule, num_stages - 1 - stage_index, num_microbatches)
            if (position, others) not in made:
                every = known.stage(position, others)
                some = every.take(every.steady_K <= bottleneck)
                made[position, others] = some.placed(self.part, ANY_SEAMS)
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

    def _prepared(self, num_microbatches: int, bottleneck: float, kinds: frozenset[str]) -> _Known:
        neighbours = [(other, self.part, other) for other in range(self.num_parts)] if self.num_parts > 1 else [()]
        own = (self.part,) * len(neighbours[0])
        slots = slots_of(self.space, self.slot_of, num_microbatches, own)
        up_to, ranges = self._ranges.get(num_microbatches, (0.0, None))
        if ranges is None or up_to < bottleneck:
            ranges = range_bounds(self.model, self.space, slots, bottleneck, neighbours)
            if len(ranges) <= MOST_KEPT:
                self._ranges[num_microbatches] = bottleneck, ranges
        batch_bytes = min((self.model.memory(slot).batch_bytes(slot) for slot in slots), default=0.0)
        machine = self.model.profile, self.model.cluster
        setting = Setting(
            kinds=kinds,
            rates=copy_rates(*machine) if kinds else None,
            interference=interference_of(*machine),
            num_microbatches=num_microbatches,
            least_ratio=min(self.space.offload_ratios, default=0.0),
        )
        limit = self.memory_limit - batch_bytes
        return _Known(bottleneck=bottleneck, memory_limit=limit, ranges=ranges, setting=setting)
