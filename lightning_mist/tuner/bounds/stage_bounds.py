"""Lower bounds of a stage under a memory limit: a fractional knapsack over what to offload, by weights of channels.

What is counted of its memory is what is there where a backward begins: parameters, optimizer state and gradients, what
the microbatches in flight keep, and the temporaries of its first region. What does not fit has to be offloaded in the
cheapest way that there could be. To free a byte

* by *activations*, a microbatch's are copied away beside a forward and back beside a backward; as many are freed as
  microbatches are in flight, but for the last two layers' of the own one. Those of the last layer of a stage without
  the tail are copied while nothing else is done;
* by *gradients*, they are fetched and written back in every backward, but for the first unit's, which nobody waits for;
* by *parameters*, they are fetched in every forward and backward, but for the two units that are there already.

What is received of a microbatch stays as long as that is in flight. Of gradients, parameters and optimizer state two
buffers stay on the device, each as large as the largest part of any unit that a rank offloads, and of gradients what is
added to them: of layers that are alike it is known what that is at least, of others that two buffers are ``2 / n`` of
what ``n`` units offload, so that no more parameters are freed than are fetched. Copies of optimizer state count for
nothing within a microbatch.

Loads take at least their sum by dual weights of channels (:mod:`lightning_mist.cost.time.overlap`), those of a forward
and those of a backward each by weights of its own; or those of a forward do, and a backward what it takes alone. The
smaller of the weights on one node and on several hold on both.

Lower bounds of ranges receive from whichever part of a cluster that takes least. Once it is known in which parts the
stages next to one lie, what it takes beyond that counts too (:class:`SeamBounds`).

Array axes
    R  ranges; see :mod:`lightning_mist.tuner.bounds.range_bounds`
    V  numbers of devices and layers
    C  channels, in the order of ``CHANNELS``
    W  pairs of weights, of a forward and of a backward
    M  ranges that have to offload something
    S  slots, one for every arrangement of devices
    K  choices
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
        others_R: Bytes of activations of every microbatch in flight but the own one.
        own_R: Bytes of activations of the own one.
        activations_WR: Weighted seconds of copying all activations of a microbatch.
        gradients_WR: Weighted seconds per byte of gradients that is freed.
        parameters_WR: Weighted seconds per byte of parameters that is freed.
        least_ratio: The least ratio of activations that are offloaded at all.
    """

    others_R: FloatArray
    own_R: FloatArray
    gradients_R: FloatArray
    parameters_R: FloatArray
    activations_WR: FloatArray
    gradients_WR: FloatArray
    parameters_WR: FloatArray
    least_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBounds:
    """Ranges at one position that are fast enough there with nothing offloaded, and what no memory limit changes.

    Attributes:
        begins_V: The first range of each pair of layers and devices.
        reach_V: Steady and boundary seconds of each pair together, whatever is offloaded.
        steady_R: Seconds of a microbatch, with its transfers, with nothing offloaded.
        needed_R: Bytes around a backward without gradients of which nobody but the own microbatch is in flight, and
            without what offloading optimizer state frees.
        kept_R: Bytes that every other microbatch in flight adds, what is received of it included.
        loads_WR: Weighted seconds of what is not copied.
        offload: What may be offloaded, if anything but optimizer state may.
    """

    layers_V: IntArray
    devices_V: IntArray
    begins_V: IntArray
    reach_V: FloatArray
    pair_R: IntArray
    steady_R: FloatArray
    needed_R: FloatArray
    gradients_R: FloatArray
    kept_R: FloatArray
    loads_WR: FloatArray
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
    alone_XR = ranges.forward_XR + ranges.backward_XR + ranges.transfer_XR + ranges.exposed_XR
    alone_R = alone_XR[at, at_R := np.flatnonzero(alone_XR[at] <= bottleneck)]
    ranges = ranges.take(at_R)
    forward_R, backward_R, transfer_R = ranges.forward_XR[at], ranges.backward_XR[at], ranges.transfer_XR[at]
    weights = _weights(setting.interference)
    forward_WC, backward_WC = weights
    loads_WR = np.outer(forward_WC[:, COMPUTE], forward_R) + np.outer(backward_WC[:, COMPUTE], backward_R) + transfer_R
    # Copies beside a backward never make it faster.
    loads_WR += np.outer(~backward_WC.any(axis=1), backward_R + ranges.exposed_XR[at])
    optimizer_R = (ranges.least_optimizer_XR if "optimizer" in setting.kinds else ranges.optimizer_XR)[at]
    pair_R = ranges.devices_R * (1 + int(ranges.layers_R.max(initial=0))) + ranges.layers_R
    begins_V = np.flatnonzero(np.diff(pair_R, prepend=-1))
    is_deferred = not setting.kinds.isdisjoint(UPDATED_KINDS)
    reach_R = alone_R + (ranges.deferred_XR if is_deferred else ranges.once_XR)[at]
    can_offload = setting.rates is not None and bool(setting.kinds - {"optimizer"})
    return PositionBounds(
        layers_V=ranges.layers_R[begins_V],
        devices_V=ranges.devices_R[begins_V],
        begins_V=begins_V,
        reach_V=np.minimum.reduceat(reach_R, begins_V) if len(reach_R) else np.empty(0),
        pair_R=np.repeat(np.arange(len(begins_V)), np.diff(begins_V, append=len(ranges))),
        steady_R=np.maximum(alone_R, loads_WR.max(axis=0, initial=0.0)),
        needed_R=ranges.always_XR[at]
        + ranges.received_XR[at]
        + ranges.parameters_XR[at]
        + ranges.activations_R
        + optimizer_R,
        gradients_R=ranges.gradients_XR[at],
        kept_R=ranges.kept_R + ranges.received_XR[at],
        loads_WR=loads_WR,
        offload=_offload_bounds(ranges, position, setting, weights) if can_offload else None,
    )


def _weights(interference: Interference | None) -> tuple[FloatArray, FloatArray]:
    """Dual weights of forwards and backwards, wherever ranks with the same parameters are; axes ``WC``."""
    near, far = (weights_of_passes(interference, across_nodes) for across_nodes in (False, True))
    return np.minimum(near[0], far[0]), np.minimum(near[1], far[1])


def _offload_bounds(
    ranges: RangeBounds, position: Position, setting: Setting, weights: tuple[FloatArray, FloatArray]
) -> OffloadBounds:
    assert setting.rates is not None
    to_device, to_host = 1 / setting.rates.to_device, 1 / setting.rates.to_host
    at, may, moves = POSITIONS.index(position), setting.kinds.__contains__, not setting.kinds <= {*UPDATED_KINDS}
    free_R = 1 - buffered_share(ranges.layers_R)[at]
    (_, _, forward_in_W, forward_out_W), (_, _, backward_in_W, backward_out_W) = (each_WC.T for each_WC in weights)
    # Behind the last layer of a stage without the tail nothing is computed.
    alone_R = np.minimum(ranges.top_R, ranges.activations_R) * (position != "last")
    own_R = np.maximum(ranges.activations_R - (0.0 if position == "last" else ranges.top_two_R), 0.0)
    if may("checkpoints"):
        # Each layer's may leave without the others', the least of them too: a byte frees one in every microbatch.
        alone_R, own_R = np.zeros_like(alone_R), ranges.activations_R
    told_R = (ranges.is_told_R & (free_R > 0)).astype(np.float64)
    # What frees nothing has no price. Of ``n`` units' gradients one part at most is not waited for, and two stay.
    each_R = told_R / np.where(free_R > 0, free_R, 1.0)
    fetched = to_device * (setting.num_microbatches > 1)
    around_W = forward_out_W * to_host + backward_in_W * to_device
    copied_R = ranges.is_told_R * (ranges.activations_R - alone_R)
    return OffloadBounds(
        others_R=ranges.activations_R * moves,
        own_R=own_R * moves,
        gradients_R=np.maximum(ranges.gradients_XR - ranges.least_gradients_XR, 0.0)[at]
        * (may("gradients") and setting.num_microbatches > 1),
        parameters_R=np.maximum(ranges.parameters_XR - ranges.least_parameters_XR, 0.0)[at] * may("parameters"),
        activations_WR=np.outer(around_W, copied_R) + (to_host + to_device) * ranges.is_told_R * alone_R,
        gradients_WR=np.outer(fetched * backward_in_W, each_R)
        + np.outer(to_host * backward_out_W, (each_R + told_R) / 2),
        parameters_WR=np.outer(to_device * (forward_in_W + backward_in_W), told_R),
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
    excess_R = found.needed_R - memory_limit + others * found.kept_R + (num_microbatches > 1) * found.gradients_R
    seconds_R = np.where(excess_R <= 0, found.steady_R, np.inf)
    steady_V = np.minimum.reduceat(seconds_R, found.begins_V) if len(seconds_R) else np.empty(0)
    if found.offload is not None:
        # Offloading is of use only to what is faster than what fits.
        at_M = np.flatnonzero(
            (excess_R > 0) & (found.steady_R <= bottleneck) & (found.steady_R < steady_V[found.pair_R])
        )
        # By one pair of weights alone most of it is already known to be too slow.
        for weights in (slice(0, 1), slice(None)):
            seconds_M = _offloaded(found, found.offload, excess_R[at_M], others, (weights, at_M))
            fast_M = (seconds_M <= bottleneck) & (seconds_M < steady_V[found.pair_R[at_M]])
            at_M, seconds_M = at_M[fast_M], seconds_M[fast_M]
        np.minimum.at(steady_V, found.pair_R[at_M], seconds_M)
    at_K = np.flatnonzero((steady_V <= bottleneck) & (steady_V < np.inf))
    steady_K = steady_V[at_K]
    boundary_K = np.maximum(found.reach_V[at_K] - steady_K, 0.0)
    return SlotChoices.anywhere(found.layers_V[at_K], found.devices_V[at_K], steady_K, boundary_K)


def _offloaded(
    found: PositionBounds,
    offload: OffloadBounds,
    excess_M: FloatArray,
    others: int,
    at_WM: tuple[slice, IntArray],
) -> FloatArray:
    """Lower bounds of ranges that have to free some bytes; infinite if offloading everything is too little.

    Args:
        others: Other microbatches in flight.
        at_WM: Which pairs of weights count, and which ranges these are.
    """
    at_M = at_WM[1]
    activations_M = others * offload.others_R[at_M] + offload.own_R[at_M]
    gradients_M, parameters_M = offload.gradients_R[at_M], offload.parameters_R[at_M]
    activations_WM = offload.activations_WR[at_WM]
    by_activations_WM = activations_WM / np.where(activations_M > 0, activations_M, np.inf)
    states = [(offload.gradients_WR[at_WM], gradients_M), (offload.parameters_WR[at_WM], parameters_M)]

    def seconds(copies_WM: FloatArray, freed_M: FloatArray) -> FloatArray:
        found_M = np.maximum((found.loads_WR[at_WM] + copies_WM).max(axis=0), found.steady_R[at_M])
        return np.where(freed_M >= excess_M * (1 - _NEXT_TO_NOTHING), found_M, np.inf)

    def cheapest(kinds: Sequence[tuple[FloatArray, FloatArray]], freed_M: FloatArray) -> FloatArray:
        return knapsack(kinds, np.minimum(excess_M, freed_M))

    # Either activations stay, or as much of them is copied as by the least ratio.
    freed_M = gradients_M + parameters_M
    without_M = seconds(cheapest(states, freed_M), freed_M)
    copies_WM = cheapest([(by_activations_WM, activations_M), *states], freed_M + activations_M)
    with_M = seconds(np.maximum(copies_WM, offload.least_ratio * activations_WM), freed_M + activations_M)
    return np.minimum(without_M, with_M)


def knapsack(kinds: Sequence[tuple[FloatArray, FloatArray]], wanted_M: FloatArray) -> FloatArray:
    """Least weighted seconds in which some bytes are freed: the value of a fractional knapsack, by its dual.

    The cheapest way to free ``e`` bytes, of kinds ``i`` that free at most ``f_i`` at ``p_i`` seconds per byte, takes

        max_j [p_j e - sum_i f_i max(0, p_j - p_i)].

    Args:
        kinds: Seconds per byte, with axes ``WM``, and bytes that can be freed at most, of every kind.
        wanted_M: Bytes to free, no more than all kinds together can.
    """
    found_WM = np.zeros(kinds[0][0].shape)
    for price_WM, _ in kinds:
        way_WM = price_WM * wanted_M
        for other_WM, freed_M in kinds:
            if other_WM is not price_WM:
                way_WM -= freed_M * np.maximum(price_WM - other_WM, 0.0)
        np.maximum(found_WM, way_WM, out=found_WM)
    return found_WM


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
