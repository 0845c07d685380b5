"""Seconds that ZeRO-2 and ZeRO-3 add to every microbatch: reducing gradients and unsharding parameters, unit by unit.

Units are the head, every layer and the tail. With ``f_r`` and ``b_r`` the seconds of a unit's forward and backward,
``u_r`` those of unsharding it and ``g_r`` those of reducing its gradients, on a device, where both happen beside
computation one unit ahead and one unit behind,

    forward   sum_{low < r < last} D(f_r, u_{r+1})
    backward  sum_{low < r < last} D(b_r, u_{r-1} + g_{r+1}) + D(b_low, g_{low+1}) + g_low

where ``D`` is what computing and communicating together (:mod:`lightning_mist.cost.time.overlap`) take more than
computing. The two outermost units are there already where a backward follows the forward of its stage, or a forward its
backward (:mod:`lightning_mist.schedule.stage_program`). A batch begins with neither, ``u_low + D(f_low, u_{low+1})``,
and where forward follows forward, or backward backward, they are unsharded once more: ``D(f_last, u_low) + D(f_low,
u_{low+1})``, or ``D(b_low, u_last) + D(b_last, u_{last-1})``. What happens so often per batch is spread over its
microbatches. On a CPU communication and computation use the same cores, so that all of it adds up: ``D(c, n) = n``.

A gradient is reduced with the first unit of its stage that uses the parameter, which is the last in backward.

Array axes
    K  candidates
    R  units, which are regions
    F  first regions of stages, as far as they differ
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import (
    BoolArray,
    FloatArray,
    IntArray,
    ParameterTable,
    StageRegions,
    StageSlot,
    prefix_sums,
)
from lightning_mist.cost.time.overlap import beyond_computing
from lightning_mist.cost.time.region_times import RegionSeconds, collective_seconds
from lightning_mist.hardware import HardwareProfile, Interference
from lightning_mist.plan import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of each unit's communication among the data-parallel ranks of its stage.

    Attributes:
        unshard_R: Giving out its parameters, from their owners to all.
        reduce_FR: Reducing the gradients that are complete with it, from all to their owners.
        row_R: Row of ``reduce_FR`` for a stage that begins with each unit.
    """

    unshard_R: FloatArray
    reduce_FR: FloatArray
    row_R: IntArray


def unit_seconds(profile: HardwareProfile, table: ParameterTable, degree: int, nodes: int) -> UnitSeconds:
    """Seconds of every unit's communication."""
    # Every owner sends what it owns of a unit as one message.
    messages_R = np.minimum(degree, table.count_R)
    return UnitSeconds(
        unshard_R=collective_seconds(profile, "broadcast", degree, nodes, table.used_R, messages_R)
        + np.where(table.used_R > 0, profile.overheads.unit_seconds, 0.0),
        reduce_FR=collective_seconds(
            profile, "reduce", degree, nodes, table.reduced_FR, np.minimum(degree, table.reductions_FR)
        )
        + np.where(table.reduced_FR > 0, profile.overheads.unit_seconds, 0.0),
        row_R=table.reduced_row_R,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSums:
    """What communication of units takes beyond computation, as sums over units and by unit.

    Every array of sums has one entry more than there are units: entry ``r`` is the sum over the units below ``r``.

    Attributes:
        reduced: Sums for backwards of units that are not recomputed, beside which gradients are reduced.
        reduced_recomputed: What those of units that are recomputed take more.
        unsharded: Sums for forwards and backwards of units that are not recomputed, between the outermost.
        unsharded_recomputed: What those of units that are recomputed take more.
        fetched_R: A forward of each unit beside which the next one is unsharded.
    """

    reduced: FloatArray
    reduced_recomputed: FloatArray
    unsharded: FloatArray
    unsharded_recomputed: FloatArray
    fetched_R: FloatArray
    bare: FloatArray

    @classmethod
    def of(cls, compute: RegionSeconds, unshard_R: FloatArray, reduce_R: FloatArray, beyond: "_Beyond") -> "UnitSums":
        """The sums of a network."""
        above_R, below_R = np.append(reduce_R[1:], 0.0), np.append(0.0, unshard_R[:-1])
        backward_R, both_R = compute.backward_R, compute.backward_R + compute.recompute_R
        fetched_R = beyond(compute.forward_R, np.append(unshard_R[1:], 0.0))
        reduced_R, reduced_recomputed_R = beyond(backward_R, above_R), beyond(both_R, above_R)
        added_R = beyond(backward_R, below_R + above_R) - reduced_R
        added_recomputed_R = beyond(both_R, below_R + above_R) - reduced_recomputed_R
        return cls(
            reduced=prefix_sums(reduced_R),
            reduced_recomputed=prefix_sums(reduced_recomputed_R - reduced_R),
            unsharded=prefix_sums(fetched_R + added_R),
            unsharded_recomputed=prefix_sums(added_recomputed_R - added_R),
            fetched_R=fetched_R,
            bare=prefix_sums(unshard_R),
        )

    def of_units(self, *, is_unsharded: bool) -> tuple[FloatArray, FloatArray]:
        """What each unit between the outermost adds to a microbatch, if it is not recomputed, and if it is."""
        plain = self.reduced + self.unsharded * is_unsharded
        return np.diff(plain), np.diff(plain + self.reduced_recomputed + self.unsharded_recomputed * is_unsharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Communication of units beside computation, among the ranks of stages that have the same rows and degrees.

    Attributes:
        interference: How communication and computation slow each other down; ``None`` where they take turns.
        sums: Sums over units by row of ``units.reduce_FR``, as far as they were asked for.
    """

    compute: RegionSeconds
    units: UnitSeconds
    is_one_unit: bool
    interference: Interference | None
    across_nodes: bool
    sums: dict[int, UnitSums] = field(default_factory=dict)

    def beyond(self, compute_R: FloatArray, network_R: FloatArray) -> FloatArray:
        """What communication adds to computation beside it, of the seconds of both alone."""
        return beyond_computing(compute_R, network_R, self.interference, self.across_nodes)

    def sums_of(self, row: int) -> UnitSums:
        """The sums for stages whose first region has a row of reductions."""
        if row not in self.sums:
            units = self.units.unshard_R, self.units.reduce_FR[row]
            self.sums[row] = UnitSums.of(self.compute, *units, self.beyond)
        return self.sums[row]

    def split(self, regions: StageRegions, chosen_K: BoolArray) -> Iterator[tuple[int, IntArray, StageRegions]]:
        """Some stages by row of reductions: the row, which they are, and their regions."""
        rows = range(len(self.units.reduce_FR))
        for row in rows:
            at_J = np.flatnonzero(chosen_K if len(rows) == 1 else chosen_K & (self.units.row_R[regions.low_K] == row))
            if len(at_J):
                yield row, at_J, regions.take(at_J)


def reduced_seconds(beside: Beside, regions: StageRegions, zero_stage_K: IntArray) -> FloatArray:
    """What reducing gradients adds to one microbatch, beyond its computation; nothing below ZeRO-2."""
    scatter_K = np.zeros(len(regions))
    for row, at_J, some in beside.split(regions, zero_stage_K >= ZeroStage.GRADIENTS):
        sums, last_J = beside.sums_of(row), some.last_K
        first_J, middle_J = np.minimum(some.first_K, last_J), np.minimum(some.middle_K, last_J)
        plain_J = sums.reduced[last_J] - sums.reduced[some.low_K]
        more_J = sums.reduced_recomputed[middle_J] - sums.reduced_recomputed[first_J]
        scatter_K[at_J] = plain_J + more_J + beside.units.reduce_FR[row][some.low_K]
    return scatter_K


def unsharding(
    beside: Beside, slot: StageSlot, regions: StageRegions, zero_stage_K: IntArray
) -> tuple[FloatArray, FloatArray]:
    """What unsharding adds to one microbatch, beyond computation, in the mean of a batch; nothing below ZeRO-3.

    Returns:
        Its seconds, and what every further stage behind adds to them, as far as microbatches are in flight between.
    """
    unshard_K, again_K = np.zeros((2, len(regions)))
    takes_turns, count = slot.schedule == "interleaved-1f1b", slot.num_microbatches
    forwards, backwards = restarts(slot)
    for row, at_J, some in beside.split(regions, zero_stage_K >= ZeroStage.PARAMETERS):
        if beside.is_one_unit and not takes_turns:
            # Nothing ever takes its place.
            unshard_K[at_J] = some.sums(beside.sums_of(row).bare) / count
            continue
        each_J, once_J = _unsharded(beside, row, some)
        forward_J, backward_J = _outermost(beside, row, some, takes_turns=takes_turns)
        unshard_K[at_J] = each_J + (once_J + forwards * forward_J + backwards * backward_J) / count
        if count > 1 and slot.schedule not in ("gpipe", "interleaved-1f1b"):
            again_K[at_J] = (forward_J + backward_J) / count
    return unshard_K, again_K


_Beyond: TypeAlias = Callable[[FloatArray, FloatArray], FloatArray]


def _unsharded(beside: Beside, row: int, some: StageRegions) -> tuple[FloatArray, FloatArray]:
    """Seconds of unsharding per microbatch, and per batch, but for where two forwards or backwards come in a row."""
    sums, low_K, last_K = beside.sums_of(row), some.low_K, some.last_K
    second_K = np.minimum(low_K + 1, last_K)
    first_K, middle_K = (np.minimum(np.maximum(unit_K, second_K), last_K) for unit_K in (some.first_K, some.middle_K))
    each_K = sums.unsharded[last_K] - sums.unsharded[second_K]
    each_K = each_K + sums.unsharded_recomputed[middle_K] - sums.unsharded_recomputed[first_K]
    return each_K, beside.units.unshard_R[low_K] + sums.fetched_R[low_K] * (second_K > low_K)


def _outermost(beside: Beside, row: int, some: StageRegions, *, takes_turns: bool) -> tuple[FloatArray, FloatArray]:
    """Seconds of unsharding in a forward that follows a forward, and in a backward that follows a backward."""
    compute, unshard_R, reduce_R = beside.compute, beside.units.unshard_R, beside.units.reduce_FR[row]
    low_K, last_K = some.low_K, some.last_K
    second_K, fore_K = np.minimum(low_K + 1, last_K), np.maximum(last_K - 1, low_K)

    def backward(unit_K: IntArray) -> FloatArray:
        is_recomputed_K = (unit_K >= some.first_K) & (unit_K < some.middle_K)
        return compute.backward_R[unit_K] + is_recomputed_K * compute.recompute_R[unit_K]

    fetched_K = beside.sums_of(row).fetched_R[low_K] * (second_K > low_K)
    forward_K = beside.beyond(compute.forward_R[last_K], unshard_R[low_K]) + fetched_K
    lowest_K, reduce_K = backward(low_K), reduce_R[second_K]
    backward_K = beside.beyond(lowest_K, unshard_R[last_K] + reduce_K) - beside.beyond(lowest_K, reduce_K)
    backward_K = backward_K + beside.beyond(backward(last_K), unshard_R[fore_K])
    # One or two units never leave, but where chunks of other layers come between.
    alone_K = unshard_R[low_K] * ((last_K == low_K) & takes_turns)
    is_many_K = last_K - low_K >= (1 if takes_turns else 2)
    return np.where(is_many_K, forward_K, alone_K), np.where(is_many_K, backward_K, alone_K)


def restarts(slot: StageSlot) -> tuple[int, int]:
    """How many forwards of a batch follow one of their own stage, and how many backwards do.

    Chunks of a group of devices take turns, by and large: all but the first count there, which is never too few.
    """
    others = slot.num_microbatches - 1
    if slot.schedule == "interleaved-1f1b":
        return others, slot.num_microbatches
    ahead = others if slot.schedule == "gpipe" else min(slot.stages_behind, others)
    return ahead, ahead
