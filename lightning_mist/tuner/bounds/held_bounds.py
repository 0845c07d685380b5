"""Lower bounds of what ranges of layers hold: activations, transfers, parameters, gradients and optimizer state.

Axes are as in :mod:`lightning_mist.tuner.bounds.range_bounds`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_mist.cost import StageSlot
from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.memory import BUFFERS, MemoryModel
from lightning_mist.plan import ZeroStage
from lightning_mist.tuner.bounds.region_sums import edges, of_layers
from lightning_mist.tuner.space import Space

SINCE = {"parameters": ZeroStage.PARAMETERS, "gradients": ZeroStage.GRADIENTS, "optimizer": ZeroStage.OPTIMIZER}
"""The ZeRO stage from which on ranks have a part each."""

MOST_DEALT = 48
"""Layers whose parameters are dealt out to ranks to know what each has: every number of them takes as long again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBounds:
    """What ranges on one arrangement of devices hold at least.

    Attributes:
        are_alike: Whether all layers are.
    """

    memory: MemoryModel
    slot: StageSlot
    space: Space
    layers_K: IntArray
    recomputed_K: IntArray
    are_alike: bool

    def of_any_zero(self) -> dict[str, Any]:
        """What :class:`RangeBounds` has of that under any ZeRO stage."""
        count = len(self.layers_K)
        return {
            "received_XR": np.repeat(self._received()[:, None], count, axis=1),
            "returned_XR": np.repeat(self._returned()[:, None], count, axis=1),
            **self._activations(),
        }

    def of_zero(self, zero_stage: int) -> dict[str, Any]:
        """What :class:`RangeBounds` has of that under a ZeRO stage beside it."""
        return {"always_XR": self._always(zero_stage), **self._states(zero_stage)}

    def trained(self) -> FloatArray:
        """Bytes of trained parameters, with axes ``XK``."""
        table = self.memory.holdings.table
        trained_XK: FloatArray = edges(table.trained_R)[:, None] + of_layers(table.single_R)[self.layers_K]
        return trained_XK

    def _received(self) -> FloatArray:
        """Bytes of what comes from the stage before, over any cut, with axis ``X``."""
        cuts_B = self.memory.costs(self.slot.rows).boundary_B[1:-1]
        return np.array([0.0, 1.0, 1.0]) * (cuts_B.min() if len(cuts_B) else 0.0)

    def _returned(self) -> FloatArray:
        """Bytes of the gradient that goes to the stage before, over any cut, with axis ``X``."""
        cuts_B = self.memory.costs(self.slot.rows).gradient_boundary_B[1:-1]
        return np.array([0.0, 1.0, 1.0]) * (cuts_B.min() if len(cuts_B) else 0.0)

    def _always(self, zero_stage: int) -> FloatArray:
        """Bytes that are there whatever is offloaded where a backward begins, with axes ``XK``.

        Where gradients are dealt out every backward makes them anew, unless all are one unit, and those of the stage's
        first unit, which the backward before has made last, are still under way.
        """
        costs, trained_R = self.memory.costs(self.slot.rows), self.memory.holdings.table.trained_R
        is_dealt = self.slot.shard_degree > 1 and zero_stage >= ZeroStage.GRADIENTS
        is_anew = is_dealt and not self.memory.holdings.is_one_unit
        plain_R = costs.first_backward_peak_R if is_anew else costs.backward_peak_R
        again_R = costs.first_recompute_backward_peak_R if is_anew else costs.recompute_backward_peak_R
        # Where all layers are recomputed so is the last, which runs first, behind the tail.
        layer_K = np.where(self.recomputed_K < self.layers_K, plain_R[1:-1].min(), again_R[1:-1].min())
        tail = float(costs.saved_R[-1] + min(plain_R[-1], again_R[-1]))
        under_way_X = np.array([trained_R[0], *[trained_R[1:-1].min()] * 2])
        under_way_X *= is_dealt and self.slot.num_microbatches > 1
        always_XK: FloatArray = np.stack([layer_K, layer_K, np.full_like(layer_K, tail)]) + under_way_X[:, None]
        always_XK[2] = np.maximum(always_XK[2], layer_K)
        always_XK += self.memory.spec.buffer_bytes
        return always_XK

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
            "activations_R": activations_K,
            "kept_R": np.maximum(activations_K - handed, 0.0),
            "top_R": top_K,
            "top_two_R": np.minimum(top_K + below_K, activations_K),
        }

    def _states(self, zero_stage: int) -> dict[str, FloatArray]:
        """Bytes of parameters, gradients and optimizer state of the rank that has most where a backward begins.

        Under ZeRO-3 others' parameters of the region at hand and of that below are there, of which some rank lacks at
        least the mean.
        """
        table, state = self.memory.holdings.table, self.memory.spec.optimizer.state_bytes_per_parameter_byte
        held_XK = self.trained()

        def share(since: ZeroStage) -> float:
            return 1 / self.slot.shard_degree if zero_stage >= since else 1.0

        layer = float(table.used_R[1:-1].min())
        # The tail and the layer below may use the same parameters.
        units_XK = 1 + np.outer([1, 1, 0], self.layers_K > 1)
        away_XK = layer * units_XK * (1 - share(ZeroStage.PARAMETERS))
        found = {
            "parameters": held_XK * share(ZeroStage.PARAMETERS),
            "gradients": held_XK * share(ZeroStage.GRADIENTS),
            "optimizer": held_XK * share(ZeroStage.OPTIMIZER),
        }
        least = {name: self._least(name, zero_stage, value_XK) for name, value_XK in found.items()}
        return {
            "parameters_XR": found["parameters"] + away_XK,
            "gradients_XR": found["gradients"],
            "optimizer_XR": state * found["optimizer"],
            "least_parameters_XR": least["parameters"] + away_XK,
            "least_gradients_XR": least["gradients"],
            "least_optimizer_XR": state * least["optimizer"],
        }

    def _least(self, kind: str, zero_stage: int, held_XK: FloatArray) -> FloatArray:
        """Bytes of parameters that a kind of state leaves on the device with any ratio, with its buffers; axes ``XK``.

        Of layers that are not alike, or too many, buffers are no smaller than what the mean rank has of a unit.
        """
        if kind not in self.space.search.offloaded:
            return held_XK
        least_XK = held_XK * buffered_share(self.layers_K)
        if self.are_alike:
            at_J = self.layers_K <= MOST_DEALT
            least_XK[:, at_J] = self.memory.states.least_held(
                self.layers_K[at_J],
                (0.0, *self.space.offload_ratios),
                self.slot.shard_degree if zero_stage >= SINCE[kind] else 1,
                BUFFERS,
                trained=kind != "parameters",
                is_summed=kind == "gradients",
            )
        return least_XK


def buffered_share(layers_K: IntArray) -> FloatArray:
    """The share of all that units offload that two buffers take; the head or the tail is one more; axes ``XK``."""
    share_XK: FloatArray = np.minimum(1.0, BUFFERS / (layers_K + np.array([[1], [0], [1]])))
    return share_XK
