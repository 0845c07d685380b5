"""Lower bounds of what ranges of layers compute, exchange and hold, whatever layers they are.

Of ``l`` layers the least sum over any ``l`` that follow each other counts, so that one entry stands for all of them.
What is left out is never negative: temporaries but for those of the first backward, buffers of outputs, what parameters
that several regions use need. Batches are left out too.

Array axes
    L  layers; lengths of ranges ``0 .. L``
    R  regions
    K  ranges: a ZeRO stage on an arrangement of devices, a number of layers, how many of the first are recomputed
    S  stages by their positions in a pipeline, in the order of ``POSITIONS``

:class:`RangeBounds` has what they compute and exchange, and what they hold: activations, transfers, parameters,
gradients and optimizer state.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.cost.inputs import ArrayRecord, BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import BUFFERS
from lightning_mist.cost.time import (
    beyond_computing,
    bucketed_seconds,
    interference_of,
    shard_nodes,
    step_seconds_once,
)
from lightning_mist.hardware import factor_of
from lightning_mist.plan import ZeroStage
from lightning_mist.tuner.candidates import ROOM
from lightning_mist.tuner.space import Shape, Space


def least_sums(values_L: FloatArray) -> FloatArray:
    """The least sum over any layers that follow each other, by their number from none to all."""
    if not len(values_L) or not np.ptp(values_L):
        multiples: FloatArray = np.arange(len(values_L) + 1) * np.float64(values_L[0] if len(values_L) else 0.0)
        return multiples
    prefix = np.concatenate([[0.0], np.cumsum(values_L)])
    return np.array([(prefix[length:] - prefix[: len(prefix) - length]).min() for length in range(len(prefix))])


def of_layers(values_R: FloatArray) -> FloatArray:
    """The least sums over ranges of layers of what regions have."""
    return least_sums(values_R[1:-1])


def edges(values_R: FloatArray) -> FloatArray:
    """What the head or the tail adds at every position; axis ``S``."""
    return np.array([values_R[0], 0.0, values_R[-1]])


def buffered_share(layers_K: IntArray) -> FloatArray:
    """The share of all that units offload that two buffers take; the head or the tail is one more; axes ``SK``."""
    share_SK: FloatArray = np.minimum(1.0, BUFFERS / (layers_K + np.array([[1], [0], [1]])))
    return share_SK


Position = Literal["first", "middle", "last"]
"""Whether a stage begins with the head of the network, ends with its tail, or neither."""

Parts: TypeAlias = tuple[int, ...]
"""The part of the cluster in which every stage lies; none if all devices are alike."""

SlotOf = Callable[[int, int, int, Shape, Parts], StageSlot]
"""A slot, by stage, number of stages and of microbatches, arrangement of its devices, and parts."""

POSITIONS: tuple[Position, ...] = ("first", "middle", "last")
"""Positions, in the order of axis ``S``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeBounds(ArrayRecord):
    """Lower bounds of ranges at every position in a pipeline, in seconds and bytes, by devices and layers.

    Attributes:
        backward_SK: Computing a backward, with what it recomputes.
        exposed_SK: What exchanging among ranks with the same parameters takes beyond computing, with nothing copied.
        once_SK: What is done once per batch.
        deferred_SK: The same where the optimizer's step may happen in the next forward.
        activations_K: What a microbatch keeps until its backward.
        kept_K: The same when its output has gone.
        top_K: The part of it that the last layer keeps.
        top_two_K: The part that the last two layers keep.
        received_SK: What is received of every microbatch, and stays as long as that is in flight.
        always_SK: What is there whatever is offloaded: temporaries of the first backward of a region, what gradients
            of the backward before it are under way, and others' parameters of what is at hand.
        is_told_K: Whether it can be told what copies take.
    """

    layers_K: IntArray
    devices_K: IntArray
    forward_SK: FloatArray
    backward_SK: FloatArray
    exposed_SK: FloatArray
    transfer_SK: FloatArray
    once_SK: FloatArray
    deferred_SK: FloatArray
    activations_K: FloatArray
    kept_K: FloatArray
    top_K: FloatArray
    top_two_K: FloatArray
    parameters_SK: FloatArray
    gradients_SK: FloatArray
    optimizer_SK: FloatArray
    received_SK: FloatArray
    always_SK: FloatArray
    is_told_K: BoolArray


def range_bounds(
    model: StageCostModel,
    space: Space,
    slots: Sequence[StageSlot],
    bottleneck: float,
    neighbours: Sequence[Parts] = ((),),
) -> RangeBounds:
    """Lower bounds of all ranges that leave the other devices time for the other layers.

    Args:
        bottleneck: The most seconds of a pipeline per microbatch, which no stage may take.
        neighbours: The parts of unlike devices in which a stage and those next to it may lie, three of each.
    """
    if not slots:
        return _no_ranges()
    rows: list[dict[str, Any]] = []
    rest_L = _least_device_seconds(model, slots)[::-1]
    for slot in slots:
        # Those that leave more than the other devices can compute in time are the first; unlike ones may be faster.
        others = np.inf if slot.parts else space.world_size - slot.devices
        fewest = int((rest_L > bottleneck * ROOM * others).sum())
        # Every microbatch passes this stage, and one the others too, one after another.
        left_L = bottleneck * ROOM - rest_L / (others * slot.num_microbatches)
        arranged = _Arranged(model, space, slot, left_L, max(fewest, 1), neighbours)
        if len(arranged.layers_K):
            zeros = set(space.search.zero_stages) if slot.data_parallel_degree > 1 else {0}
            counted = {zero_stage: {zero_stage} for zero_stage in zeros}
            if slot.shard_group is not None:
                counted.pop(0, None)  # Without it there are no groups.
            elif ZeroStage.OPTIMIZER in zeros and 0 in zeros:
                # Of every microbatch the time is the same; in memory it is never more.
                counted[ZeroStage.OPTIMIZER] |= counted.pop(0)
            common = arranged.of_any_zero()
            rows += [{**common, **arranged.of_zero(zero_stage, counted[zero_stage])} for zero_stage in sorted(counted)]
    if not rows:
        return _no_ranges()
    order_K = np.lexsort([np.concatenate([row[name] for row in rows]) for name in ("layers_K", "devices_K")])
    # One figure after another, so that there are never two of all.
    return RangeBounds(
        **{
            item.name: np.concatenate([row.pop(item.name) for row in rows], axis=-1)[..., order_K]
            for item in fields(RangeBounds)
        }
    )


def _least_device_seconds(model: StageCostModel, slots: Sequence[StageSlot]) -> FloatArray:
    """Seconds times devices that so many layers take at least, whichever they are, from none to all."""
    found = [(model.region_seconds(*slot.computed), slot.devices) for slot in slots]
    each_L = np.min([(item.forward_R + item.backward_R)[1:-1] * devices for item, devices in found], axis=0)
    return np.concatenate([[0.0], np.cumsum(np.sort(each_L))])


def _no_ranges() -> RangeBounds:
    kinds = {"layers_K": np.int64, "devices_K": np.int64, "is_told_K": np.bool_}
    numbers: dict[str, Any] = {name: np.empty(0, dtype=kind) for name, kind in kinds.items()}
    names = [item.name for item in fields(RangeBounds)]
    empty = {name: np.empty((len(POSITIONS), 0) if name.endswith("_SK") else 0) for name in names}
    return RangeBounds(**(empty | numbers))


def slots_of(space: Space, slot_of: SlotOf, num_microbatches: int, parts: Parts = ()) -> tuple[StageSlot, ...]:
    """A slot of a pipeline for every arrangement of devices that leaves some to other stages.

    Args:
        parts: The part of unlike devices in which each of three stages lies; the slot is that of the second.
    """
    shapes = (shape for shape in space.shapes(num_microbatches) if shape.devices < space.world_size)
    return tuple(slot_of(1, len(parts) or 2, num_microbatches, shape, parts) for shape in shapes)


def received(model: StageCostModel, slot: StageSlot, num_layers: int) -> tuple[float, float]:
    """Seconds of receiving what comes from the front and from behind, over any cut."""
    arrival, back = (float(crossing[1:num_layers].min()) * least_correction(model) for crossing in model.cuts(slot))
    return arrival, back


def least_correction(model: StageCostModel) -> float:
    """How much less communication may take: a correction says of what is exposed of it how much longer it takes."""
    return min(1.0, factor_of(model.profile.corrections, "communication"))


class _Arranged:
    """Ranges on one arrangement of devices, of the fewest layers or more."""

    def __init__(
        self,
        model: StageCostModel,
        space: Space,
        slot: StageSlot,
        left_L: FloatArray,
        fewest: int,
        neighbours: Sequence[Parts],
    ) -> None:
        self.model, self.space, self.slot, self.neighbours = model, space, slot, neighbours
        self.memory, self.degree = model.memory(slot), slot.shard_degree
        self.compute = model.region_seconds(*slot.computed)
        both_L, again_L = map(of_layers, (self.compute.forward_R + self.compute.backward_R, self.compute.recompute_R))
        lengths_K = np.arange(fewest, space.num_layers)
        lengths_K = lengths_K[both_L[lengths_K] <= left_L[lengths_K]]
        index_K, recomputed_K = space.recomputed(lengths_K)
        layers_K = lengths_K[index_K]
        in_time_K = both_L[layers_K] + again_L[recomputed_K] <= left_L[layers_K]
        self.layers_K, self.recomputed_K = layers_K[in_time_K], recomputed_K[in_time_K]
        self.corrected = least_correction(model)
        self.forward_SK = self._summed(self.compute.forward_R)
        self.backward_SK = self._summed(self.compute.backward_R) + again_L[self.recomputed_K]

    def of_any_zero(self) -> dict[str, Any]:
        """What :class:`RangeBounds` has of them under any ZeRO stage."""
        count = len(self.layers_K)
        return {
            "layers_K": self.layers_K,
            "devices_K": np.full(count, self.slot.devices),
            "forward_SK": self.forward_SK,
            "backward_SK": self.backward_SK,
            "transfer_SK": np.repeat(self._transferred()[:, None], count, axis=1),
            "received_SK": np.repeat(self._received()[:, None], count, axis=1),
            **self._activations(),
        }

    def of_zero(self, zero_stage: int, counted: Collection[int]) -> dict[str, Any]:
        """What :class:`RangeBounds` has of them under a ZeRO stage beside that.

        Args:
            counted: ZeRO stages of which the least counts once per batch.
        """
        # Copies are priced with what is exposed of communication, and corrections change only one of both.
        is_told = (not self.memory.holdings.is_one_unit or zero_stage < ZeroStage.PARAMETERS) and (
            not self.model.profile.corrections or zero_stage < ZeroStage.GRADIENTS
        )
        computed = self.forward_SK, self.backward_SK
        once_SK, deferred_SK = _least_once(self.model, self.slot, counted, self._trained(), *computed)
        return {
            "is_told_K": np.full(len(self.layers_K), is_told),
            "once_SK": once_SK,
            "deferred_SK": deferred_SK,
            "exposed_SK": self._exposed(zero_stage),
            "always_SK": self._always(zero_stage),
            **self._states(zero_stage),
        }

    def _summed(self, values_R: FloatArray) -> FloatArray:
        """The least sums of ranges, with axes ``SK``."""
        sums_SK: FloatArray = edges(values_R)[:, None] + of_layers(values_R)[self.layers_K]
        return sums_SK

    def _transferred(self) -> FloatArray:
        """Seconds of receiving what comes from the neighbours, over any cut, with axis ``S``."""
        slots = [replace(self.slot, parts=parts) for parts in self.neighbours]
        arrival, back = np.min([received(self.model, slot, self.space.num_layers) for slot in slots], axis=0)
        return np.array([back, arrival + back, arrival])

    def _exposed(self, zero_stage: int) -> FloatArray:
        """What communication takes beyond computing (:mod:`lightning_mist.cost.time.pass_seconds`); axes ``SK``.

        Behind the first unit's backward nothing hides its reduction. Beside the backward of any but the last unit that
        above is reduced; beside that of any but the outermost two the one below is unsharded too.
        """
        if self.degree == 1 or zero_stage < ZeroStage.GRADIENTS:
            return np.zeros((len(POSITIONS), len(self.layers_K)))
        beside = self.model.beside(self.slot, self.compute)
        # Where all parameters are one unit they are unsharded once per batch.
        is_unsharded = zero_stage >= ZeroStage.PARAMETERS and not beside.is_one_unit
        plain_R, again_R = beside.between(is_unsharded=is_unsharded)
        # Those next to the head or the tail are never between two layers; without any there is none in between.
        plain, again = (
            float(np.min(values_R[1 + is_unsharded : -2])) if len(values_R) > 3 + is_unsharded else 0.0
            for values_R in (plain_R, np.minimum(plain_R, again_R))
        )
        between_K = np.maximum(self.layers_K - 1 - is_unsharded, 0)
        again_K = np.minimum(self.recomputed_K, between_K)
        inside_K = (between_K - again_K) * plain + again_K * again
        lowest_R = beside.reduce_JR.min(axis=0)
        lowest = float(lowest_R[1:-1].min(initial=np.inf))
        exposed_SK: FloatArray = np.array([float(lowest_R[0]), lowest, lowest])[:, None] + inside_K
        return exposed_SK * self.corrected

    def _trained(self) -> FloatArray:
        """Bytes of trained parameters, with axes ``SK``."""
        table = self.memory.holdings.table
        trained_SK: FloatArray = edges(table.trained_R)[:, None] + of_layers(table.single_R)[self.layers_K]
        return trained_SK

    def _received(self) -> FloatArray:
        """Bytes of what comes from the stage before, over any cut, with axis ``S``."""
        cuts = self.memory.costs(self.slot.rows).boundary_by_cut[1:-1]
        return np.array([0.0, 1.0, 1.0]) * (cuts.min() if len(cuts) else 0.0)

    def _always(self, zero_stage: int) -> FloatArray:
        """Bytes that are there whatever is offloaded where a backward begins, with axes ``SK``.

        Where gradients are dealt out every backward makes them anew, unless all are one unit, and those of the stage's
        first unit, which the backward before has made last, are still under way. Under ZeRO-3 others' parameters of the
        region at hand and of that below are there, of which some rank lacks at least the mean.
        """
        costs, table = self.memory.costs(self.slot.rows), self.memory.holdings.table
        trained_R = table.trained_R
        is_dealt = self.slot.shard_degree > 1 and zero_stage >= ZeroStage.GRADIENTS
        is_anew = is_dealt and not self.memory.holdings.is_one_unit
        plain_R = costs.first_backward_peak_R if is_anew else costs.backward_peak_R
        again_R = costs.first_recompute_backward_peak_R if is_anew else costs.recompute_backward_peak_R
        # Where all layers are recomputed so is the last, which runs first, behind the tail.
        layer_K = np.where(self.recomputed_K < self.layers_K, plain_R[1:-1].min(), again_R[1:-1].min())
        tail = float(costs.saved_R[-1] + min(plain_R[-1], again_R[-1]))
        under_way = np.array([trained_R[0], *[trained_R[1:-1].min()] * 2])
        under_way *= is_dealt and self.slot.num_microbatches > 1
        always_SK: FloatArray = np.stack([layer_K, layer_K, np.full_like(layer_K, tail)]) + under_way[:, None]
        always_SK[2] = np.maximum(always_SK[2], layer_K)
        always_SK += self.memory.spec.buffer_bytes
        # The tail and the layer below may use the same parameters.
        units_SK = 1 + np.outer([1, 1, 0], self.layers_K > 1)
        lacks = 1 - 1 / self.slot.shard_degree if zero_stage >= ZeroStage.PARAMETERS else 0.0
        return always_SK + float(table.used_R[1:-1].min()) * units_SK * lacks

    def _activations(self) -> dict[str, FloatArray]:
        """Bytes of what microbatches keep for backward."""
        costs, layers_K, recomputed_K = self.memory.costs(self.slot.rows), self.layers_K, self.recomputed_K
        plain_L, inputs_L = of_layers(costs.saved_R), of_layers(costs.checkpointed_saved_R)
        activations_K = plain_L[layers_K - recomputed_K] + inputs_L[recomputed_K]
        handed = float(max(costs.handed_R.max(), costs.checkpointed_handed_R.max()))
        top_K = np.where(recomputed_K < layers_K, plain_L[1], inputs_L[1])
        # The one below the top is recomputed if all but the top, or all, are.
        below_K = np.where(recomputed_K >= layers_K - 1, inputs_L[1], plain_L[1]) * (layers_K > 1)
        return {
            "activations_K": activations_K,
            "kept_K": np.maximum(activations_K - handed, 0.0),
            "top_K": top_K,
            "top_two_K": np.minimum(top_K + below_K, activations_K),
        }

    def _states(self, zero_stage: int) -> dict[str, FloatArray]:
        """Bytes of parameters, gradients and optimizer state of the rank that has most where a backward begins."""
        held_SK, state = self._trained(), self.memory.spec.optimizer.state_bytes_per_parameter_byte

        def share(since: ZeroStage) -> float:
            return 1 / self.slot.shard_degree if zero_stage >= since else 1.0

        return {
            "parameters_SK": held_SK * share(ZeroStage.PARAMETERS),
            "gradients_SK": held_SK * share(ZeroStage.GRADIENTS),
            "optimizer_SK": state * held_SK * share(ZeroStage.OPTIMIZER),
        }


def _least_once(
    model: StageCostModel,
    slot: StageSlot,
    zero_stages: Collection[int],
    trained_SK: FloatArray,
    forward_SK: FloatArray,
    backward_SK: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds that a batch takes once, beyond a microbatch in the middle of it.

    Counted are the optimizer's step, averaging gradients, and giving out updated parameters. Where state is offloaded
    the step may happen in the next first forward, beside which parameters are given out. With ``C`` the seconds of two
    loads that run together, ``f`` and ``b`` computing a forward and a backward, ``o`` the update, ``m`` averaging
    gradients and ``e`` giving out parameters, steady and boundary time together are at least

        C(f + o, e) + C(b, m)  =  f + b + o + beyond(f + o, e) + beyond(b, m),

    whatever is copied. ``C`` grows with each load, so that it may be taken of the least that each can be.

    Args:
        zero_stages: ZeRO stages of which the least counts.
        trained_SK: Bytes of trained parameters that ranges hold at least.
        forward_SK: Seconds of computing a forward, at least.
        backward_SK: The same of a backward, with what it recomputes.

    Returns:
        Them with the step behind the last backward, and with the step in the next forward.
    """
    if model.profile.corrections:
        # Runs have corrected each term by itself.
        return np.zeros_like(trained_SK), np.zeros_like(trained_SK)
    machine, degree = (model.profile, model.cluster), slot.shard_degree
    even = model.spec.module_map.even_shards
    across = shard_nodes(model.cluster, slot) > 1
    beside = interference_of(*machine), across
    found = []
    for zero_stage in zero_stages:
        shares = zero_stage >= ZeroStage.OPTIMIZER and degree > 1
        reduces, gives = shares and zero_stage >= ZeroStage.GRADIENTS, shares and zero_stage < ZeroStage.PARAMETERS
        owned_SK, none_SK = trained_SK / (degree if shares else 1), np.zeros_like(trained_SK)
        flags = np.full(trained_SK.shape, reduces), np.full(trained_SK.shape, gives)
        update_SK = step_seconds_once(machine, model.spec, slot, (trained_SK, none_SK, owned_SK), flags)
        averaged_SK = given_SK = none_SK
        if degree > 1 and not reduces:
            averaged_SK = bucketed_seconds(machine, slot, "reduce" if shares else "all_reduce", trained_SK, even=even)
        if gives:
            given_SK = bucketed_seconds(machine, slot, "broadcast", trained_SK, even=even)
        both_SK = update_SK + beyond_computing(backward_SK, averaged_SK, *beside)
        found.append((both_SK + given_SK, both_SK + beyond_computing(forward_SK + update_SK, given_SK, *beside)))
    behind, inside = (np.min(items, axis=0) for items in zip(*found, strict=True))
    return behind, inside
