"""Seconds that ZeRO-2 and ZeRO-3 add to every microbatch: reducing gradients and unsharding parameters, unit by unit.

Units are the head, every layer and the tail. With ``f_r`` and ``b_r`` the seconds of a unit's forward and backward,
``u_r`` those of unsharding it and ``g_r`` those of reducing its gradients, on a device, where both happen beside
computation one unit ahead and one unit behind,

    forward   u_first + sum_r max(f_r, u_{r+1})
    backward  u_last + sum_r max(b_r, u_{r-1} + g_{r+1}) + g_first

A unit beyond the stage counts in the maxima at its two ends, which is never too little. On a CPU communication and
computation use the same cores, so that all of it adds up.

Array axes
    K  candidates
    R  units, which are regions
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.candidates import StageCandidates
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.regions import ParameterTable
from lightning_mist.cost.time import RegionSeconds, collective_seconds
from lightning_mist.hardware import HardwareProfile
from lightning_mist.plan import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of each unit's communication among the data-parallel ranks of its stage.

    Attributes:
        unshard_R: Giving out its parameters, from their owners to all.
        reduce_R: Reducing its gradients, from all to their owners.
    """

    unshard_R: FloatArray
    reduce_R: FloatArray


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
        unshard_R=collective_seconds(profile, "broadcast", degree, nodes, table.used_R, messages_R),
        reduce_R=collective_seconds(profile, "reduce", degree, nodes, table.trained_R, messages_R),
    )


def exposed_seconds(
    compute: RegionSeconds,
    units: UnitSeconds,
    candidates: StageCandidates,
    low_K: IntArray,
    high_K: IntArray,
    *,
    overlaps: bool,
) -> tuple[FloatArray, FloatArray]:
    """What unsharding and reducing add to one microbatch, beyond its computation.

    Args:
        compute: Seconds of every region.
        units: Seconds of communication.
        candidates: The stages.
        low_K: Their first region.
        high_K: One past their last region.
        overlaps: Whether communication happens beside computation.

    Returns:
        Seconds of unsharding and of reducing, of each candidate by its ZeRO stage.
    """
    shards_K = candidates.zero_stage_K >= ZeroStage.PARAMETERS
    reduces_K = candidates.zero_stage_K >= ZeroStage.GRADIENTS
    none_R = np.zeros_like(units.unshard_R)
    if not overlaps:
        unshard_K = 2 * _between(units.unshard_R, low_K, high_K)
        return np.where(shards_K, unshard_K, 0.0), np.where(reduces_K, _between(units.reduce_R, low_K, high_K), 0.0)
    next_R = np.concatenate([units.unshard_R[1:], [0.0]])
    forward_K = _between(np.maximum(next_R - compute.forward_R, 0.0), low_K, high_K) + units.unshard_R[low_K]

    def backward(unshard_R: FloatArray, reduce_R: FloatArray) -> FloatArray:
        beside_R = np.concatenate([[0.0], unshard_R[:-1]]) + np.concatenate([reduce_R[1:], [0.0]])
        plain_R = np.maximum(beside_R - compute.backward_R, 0.0)
        recomputed_R = np.maximum(beside_R - compute.backward_R - compute.forward_R, 0.0)
        first_K = candidates.start_K + 1
        result_K = _between(plain_R, low_K, high_K) + unshard_R[high_K - 1] + reduce_R[low_K]
        return result_K + _between(recomputed_R - plain_R, first_K, first_K + candidates.checkpointed_K)

    reduce_K = backward(none_R, units.reduce_R)
    both_K = backward(units.unshard_R, units.reduce_R)
    return np.where(shards_K, forward_K + both_K - reduce_K, 0.0), np.where(reduces_K, reduce_K, 0.0)


def _between(values_R: FloatArray, low_K: IntArray, high_K: IntArray) -> FloatArray:
    prefix = np.concatenate([[0.0], np.cumsum(values_R)])
    result_K: FloatArray = prefix[high_K] - prefix[low_K]
    return result_K
