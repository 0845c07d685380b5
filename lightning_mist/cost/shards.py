"""Seconds that ZeRO-2 and ZeRO-3 add to every microbatch: reducing gradients and unsharding parameters, unit by unit.

Units are the head, every layer and the tail. With ``f_r`` and ``b_r`` the seconds of a unit's forward and backward,
``u_r`` those of unsharding it and ``g_r`` those of reducing its gradients, on a device, where both happen beside
computation one unit ahead and one unit behind,

    forward   sum_{low < r < last} D(f_r, u_{r+1})
    backward  sum_{low < r < last} D(b_r, u_{r-1} + g_{r+1}) + D(b_low, g_{low+1}) + g_low

where ``D`` is what computing and communicating together (:mod:`lightning_mist.cost.overlap`) take more than computing.
The two outermost units are there already where a backward follows the forward of its stage, or a forward its backward
(:mod:`lightning_mist.schedule.units`). A batch begins with neither, ``u_low + D(f_low, u_{low+1})``, and where forward
follows forward, or backward backward, they are unsharded once more: ``D(f_last, u_low) + D(f_low, u_{low+1})``, or
``D(b_low, u_last) + D(b_last, u_{last-1})``. What happens so often per batch is spread over its microbatches. On a CPU
communication and computation use the same cores, so that all of it adds up: ``D(c, n) = n``.

A gradient is reduced with the first unit of its stage that uses the parameter, which is the last in backward.

Array axes
    K  candidates
    R  units, which are regions
    F  first regions of stages, as far as they differ
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.overlap import concurrent_seconds
from lightning_mist.cost.regions import ParameterTable
from lightning_mist.cost.time import RegionSeconds, collective_seconds
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
    """Seconds of every unit's communication.

    Args:
        profile: The machine.
        table: Bytes and number of the parameters of every unit.
        degree: Data-parallel ranks.
        nodes: Nodes that they span.
    """
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


def exposed_seconds(
    compute: RegionSeconds,
    units: UnitSeconds,
    slot: StageSlot,
    candidates: StageCandidates,
    low_K: IntArray,
    high_K: IntArray,
    *,
    is_one_unit: bool,
    interference: Interference | None,
    across_nodes: bool,
) -> tuple[FloatArray, FloatArray]:
    """What unsharding and reducing add to one microbatch, beyond its computation.

    Args:
        compute: Seconds of every region.
        units: Seconds of communication.
        slot: Where the stages are.
        candidates: The stages.
        low_K: Their first region.
        high_K: One past their last region.
        is_one_unit: Whether all parameters of a stage are one unit.
        interference: How communication and computation slow each other down; ``None`` where they take turns.
        across_nodes: Whether the ranks are in several nodes.

    Returns:
        Seconds of unsharding and of reducing, of each candidate by its ZeRO stage.
    """
    none_R = np.zeros(1)

    def beyond(compute_R: FloatArray, network_R: FloatArray) -> FloatArray:
        if interference is None:
            return network_R
        both_R = concurrent_seconds(compute_R, network_R, none_R, none_R, interference, across_nodes)
        beyond_R: FloatArray = np.maximum(both_R - compute_R, 0.0)
        return beyond_R

    shards_K = candidates.zero_stage_K >= ZeroStage.PARAMETERS
    reduces_K = candidates.zero_stage_K >= ZeroStage.GRADIENTS
    unshard_K, scatter_K = np.zeros(len(candidates)), np.zeros(len(candidates))
    for row in np.unique(units.row_R[low_K]):
        at_J = np.flatnonzero((units.row_R[low_K] == row) & reduces_K)
        some = _Some(
            low_J=low_K[at_J],
            last_J=high_K[at_J] - 1,
            first_J=candidates.start_K[at_J] + 1,
            middle_J=candidates.start_K[at_J] + 1 + candidates.checkpointed_K[at_J],
        )
        reduce_R = units.reduce_FR[row]
        scatter_K[at_J] = _reduced(compute, reduce_R, some, beyond)
        if is_one_unit and slot.schedule != "interleaved-1f1b":
            # Nothing ever takes its place.
            unshard_K[at_J] = _between(units.unshard_R, some.low_J, some.last_J + 1) / slot.num_microbatches
        else:
            unshard_K[at_J] = _unsharded(compute, (units.unshard_R, reduce_R), some, slot, beyond)
    return np.where(shards_K, unshard_K, 0.0), scatter_K


@dataclass(frozen=True, slots=True, kw_only=True)
class _Some:
    """Units of some candidates: the first, the last, the first that may be recomputed, and the first behind those."""

    low_J: IntArray
    last_J: IntArray
    first_J: IntArray
    middle_J: IntArray


_Beyond = Callable[[FloatArray, FloatArray], FloatArray]


def _reduced(compute: RegionSeconds, reduce_R: FloatArray, some: _Some, beyond: _Beyond) -> FloatArray:
    """Seconds of reducing a microbatch's gradients."""
    above_R = np.concatenate([reduce_R[1:], [0.0]])
    plain_R = beyond(compute.backward_R, above_R)
    more_R = beyond(compute.backward_R + compute.forward_R, above_R) - plain_R
    first_J, middle_J = (np.minimum(unit_J, some.last_J) for unit_J in (some.first_J, some.middle_J))
    result_J: FloatArray = _between(plain_R, some.low_J, some.last_J) + _between(more_R, first_J, middle_J)
    return result_J + reduce_R[some.low_J]


def _unsharded(
    compute: RegionSeconds, units: tuple[FloatArray, FloatArray], some: _Some, slot: StageSlot, beyond: _Beyond
) -> FloatArray:
    """Seconds of unsharding for a microbatch, the mean of a batch.

    Args:
        compute: Seconds of every region.
        units: Seconds of unsharding and of reducing each.
        some: The candidates.
        slot: Where they are.
        beyond: What communication adds to computation beside it.
    """
    unshard_R, reduce_R = units
    low_J, last_J = some.low_J, some.last_J
    second_J, fore_J = np.minimum(low_J + 1, last_J), np.maximum(last_J - 1, low_J)
    above_R = np.concatenate([reduce_R[1:], [0.0]])
    below_R, next_R = np.concatenate([[0.0], unshard_R[:-1]]), np.concatenate([unshard_R[1:], [0.0]])

    def added(compute_R: FloatArray, unshard_R: FloatArray, reduce_R: FloatArray) -> FloatArray:
        return beyond(compute_R, unshard_R + reduce_R) - beyond(compute_R, reduce_R)

    def backward(unit_J: IntArray) -> FloatArray:
        again_J = (unit_J >= some.first_J) & (unit_J < some.middle_J)
        seconds_J: FloatArray = compute.backward_R[unit_J] + again_J * compute.forward_R[unit_J]
        return seconds_J

    plain_R = added(compute.backward_R, below_R, above_R)
    more_R = added(compute.backward_R + compute.forward_R, below_R, above_R) - plain_R
    end_J = np.maximum(last_J, second_J)
    first_J, middle_J = (np.clip(unit_J, second_J, end_J) for unit_J in (some.first_J, some.middle_J))
    steady_J = _between(beyond(compute.forward_R, next_R) + plain_R, second_J, end_J)
    steady_J = steady_J + _between(more_R, first_J, middle_J)
    fetched_J = np.where(second_J > low_J, beyond(compute.forward_R[low_J], unshard_R[second_J]), 0.0)
    forward_J = beyond(compute.forward_R[last_J], unshard_R[low_J]) + fetched_J
    backward_J = added(backward(low_J), unshard_R[last_J], reduce_R[second_J])
    backward_J = backward_J + beyond(backward(last_J), unshard_R[fore_J])
    # One or two units never leave, but where chunks of other layers come between.
    takes_turns = slot.schedule == "interleaved-1f1b"
    alone_J = np.where(last_J == low_J, unshard_R[low_J] * takes_turns, 0.0)
    is_many_J = last_J - low_J >= (1 if takes_turns else 2)
    forward_J, backward_J = (np.where(is_many_J, seconds_J, alone_J) for seconds_J in (forward_J, backward_J))
    forwards, backwards = restarts(slot)
    once_J = unshard_R[low_J] + fetched_J + forwards * forward_J + backwards * backward_J
    result_J: FloatArray = steady_J + once_J / slot.num_microbatches
    return result_J


def restarts(slot: StageSlot) -> tuple[int, int]:
    """How many forwards of a batch follow one of their own stage, and how many backwards do.

    Chunks of a group of devices take turns, by and large: all but the first count there, which is never too few.

    Args:
        slot: The stage's place.
    """
    others = slot.num_microbatches - 1
    if slot.schedule == "interleaved-1f1b":
        return others, slot.num_microbatches
    ahead = others if slot.schedule == "gpipe" else min(slot.stages_behind, others)
    return ahead, ahead


def _between(values_R: FloatArray, low_K: IntArray, high_K: IntArray) -> FloatArray:
    prefix = np.concatenate([[0.0], np.cumsum(values_R)])
    result_K: FloatArray = prefix[high_K] - prefix[low_K]
    return result_K
