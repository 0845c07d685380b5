"""Prefix sums of what regions take, from which the seconds of any run of regions are a difference.

Array axes
    R  regions
    K  candidates
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray, RegionCosts, StageCandidates, prefix_sums
from lightning_mist.cost.time.region_times import RegionSeconds


def weight_shares(costs: RegionCosts) -> FloatArray:
    """Share of every region's backward that makes gradients of matrices, by FLOPs."""
    share_R: FloatArray = np.minimum(1.0, costs.weight_flops_R / np.maximum(costs.backward_flops_R, 1.0))
    return share_R


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSums:
    """Prefix sums of seconds of regions.

    Attributes:
        weight: Of the part of backwards that makes gradients of matrices.
        exchange: Of the parts of forwards and backwards in which tensor-parallel ranks exchange; ``None`` without such.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    exchange: tuple[FloatArray, FloatArray] | None

    @classmethod
    def of(cls, compute: RegionSeconds, weight_R: FloatArray) -> "RegionSums":
        """The sums of a network.

        Args:
            weight_R: Share of every region's backward that makes gradients of matrices.
        """
        return cls(
            forward=prefix_sums(compute.forward_R),
            backward=prefix_sums(compute.backward_R),
            weight=prefix_sums(weight_R * compute.backward_R),
            exchange=None
            if compute.exchange is None
            else (prefix_sums(compute.exchange[0]), prefix_sums(compute.exchange[1])),
        )

    def exchanged(
        self, candidates: StageCandidates, low_K: IntArray, high_K: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What tensor-parallel ranks exchange in a forward, a backward, and what is recomputed."""
        if self.exchange is None:
            none_K = np.zeros(len(candidates))
            return none_K, none_K, none_K
        forward, backward = self.exchange
        first_K = candidates.start_K + 1
        again_K = forward[first_K + candidates.checkpointed_K] - forward[first_K]
        return forward[high_K] - forward[low_K], backward[high_K] - backward[low_K], again_K
