"""Seconds that ZeRO-2 and ZeRO-3 add to every microbatch: reducing gradients and unsharding parameters, unit by unit.

Units are the head, every layer and the tail. With ``f_r`` and ``b_r`` the seconds of a unit's forward and backward,
``u_r`` those of unsharding it and ``g_r`` those of reducing its gradients, on a device, where both happen beside
computation one unit ahead and one unit behind,

    forward   u_first + sum_r C(f_r, u_{r+1})
    backward  u_last + sum_r C(b_r, u_{r-1} + g_{r+1}) + g_first

where ``C`` are the seconds that computing and communicating take together (:mod:`lightning_mist.cost.overlap`). A unit
beyond the stage counts in the maxima at its two ends, which is never too little. On a CPU communication and computation
use the same cores, so that all of it adds up.

Array axes
    K  candidates
    R  units, which are regions
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.candidates import StageCandidates
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
        unshard_R=collective_seconds(profile, "broadcast", degree, nodes, table.used_R, messages_R)
        + np.where(table.used_R > 0, profile.overheads.unit_seconds, 0.0),
        reduce_R=collective_seconds(profile, "reduce", degree, nodes, table.trained_R, messages_R)
        + np.where(table.trained_R > 0, profile.overheads.unit_seconds, 0.0),
    )


def exposed_seconds(
    compute: RegionSeconds,
    units: UnitSeconds,
    candidates: StageCandidates,
    low_K: IntArray,
    high_K: IntArray,
    *,
    interference: Interference | None,
    across_nodes: bool,
) -> tuple[FloatArray, FloatArray]:
    """What unsharding and reducing add to one microbatch, beyond its computation.

    Args:
        compute: Seconds of every region.
        units: Seconds of communication.
        candidates: The stages.
        low_K: Their first region.
        high_K: One past their last region.
        interference: How communication and computation slow each other down; ``None`` where they take turns.
        across_nodes: Whether the ranks are in several nodes.

    Returns:
        Seconds of unsharding and of reducing, of each candidate by its ZeRO stage.
    """
    shards_K = candidates.zero_stage_K >= ZeroStage.PARAMETERS
    reduces_K = candidates.zero_stage_K >= ZeroStage.GRADIENTS
    none_R = np.zeros_like(units.unshard_R)
    if interference is None:
        unshard_K = 2 * _between(units.unshard_R, low_K, high_K)
        return np.where(shards_K, unshard_K, 0.0), np.where(reduces_K, _between(units.reduce_R, low_K, high_K), 0.0)

    def beyond(compute_R: FloatArray, network_R: FloatArray) -> FloatArray:
        both_R = concurrent_seconds(compute_R, network_R, none_R, none_R, interference, across_nodes)
        beyond_R: FloatArray = np.maximum(both_R - compute_R, 0.0)
        return beyond_R

    next_R = np.concatenate([units.unshard_R[1:], [0.0]])
    forward_K = _between(beyond(compute.forward_R, next_R), low_K, high_K) + units.unshard_R[low_K]

    def backward(unshard_R: FloatArray, reduce_R: FloatArray) -> FloatArray:
        beside_R = np.concatenate([[0.0], unshard_R[:-1]]) + np.concatenate([reduce_R[1:], [0.0]])
        plain_R = beyond(compute.backward_R, beside_R)
        recomputed_R = beyond(compute.backward_R + compute.forward_R, beside_R)
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
