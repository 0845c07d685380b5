"""What runs of layers compute, exchange and hold at least, wherever they lie: a few sums over layers.

Of ``l`` layers the least sum over any run of that length counts, so that one entry stands for all runs. What is left
out is never negative: temporaries of all but one layer, buffers of transfers, updates, what parameters that several
regions use need. Batches are left out too, so that runs are the same whatever the size of a batch.

Array axes
    L  layers; lengths of runs ``0 .. L``
    R  regions
    K  runs: arrangement of devices and ZeRO stage, number of layers, how many of the first are recomputed
    X  with neither the head nor the tail, with the head, with the tail: places in a pipeline
    N  on one node, on several
    W  sets of weights
    C  channels
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot
from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.memory import BUCKET_BYTES
from lightning_mist.cost.time import (
    UnitSeconds,
    collective_seconds,
    interference_of,
    shard_nodes,
    transfers,
    unit_seconds,
)
from lightning_mist.hardware import Cluster, HardwareProfile, factor_of
from lightning_mist.plan import ZeroStage
from lightning_mist.tuner.load_weights import load_weights
from lightning_mist.tuner.space import Shape, Space
from lightning_mist.tuner.tables import ROOM

PLACES = ("middle", "first", "last")
"""Places in a pipeline, in the order of axis ``X``."""

OUTERMOST = 4
"""Units of a stage that a microbatch finds unsharded already, at most; see
:func:`lightning_mist.cost.time.zero_seconds`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRuns:
    """Seconds and bytes that runs of layers take and hold at least, of one number of microbatches.

    Attributes:
        pace: Seconds per microbatch; runs that compute for longer are missing.
        layers_K: Layers.
        devices_K: Devices.
        recomputed_K: Layers that are recomputed.
        cell_K: A number that tells devices, and layers, from others; it rises with the former, then the latter.
        order_K: The runs by that number.
        forward_XK: Computing a forward.
        backward_XK: Computing a backward, with what it recomputes.
        forward_network_K: Exchanging among ranks with the same parameters beside a forward.
        backward_network_K: The same beside a backward.
        outer_K: The part of both that the outermost units may not take.
        reduce_XK: Averaging gradients after the last microbatch, hidden or not.
        arrival_K: Receiving the input.
        return_K: Receiving the gradient of the output.
        saved_K: What one microbatch keeps until its backward, when its output has gone.
        whole_K: The same with its output.
        top_K: The part of it that the last layer keeps.
        top_two_K: The part that the last two layers keep.
        working_XK: What is alive of its own microbatch in some moment of a backward.
        parameters_XK: Parameters.
        gradients_XK: Gradients that stay.
        optimizer_XK: Optimizer state.
        always_K: What is there whatever is moved, without the batches that a rank has.
        copies_K: 1 where it can be told what copies take, else 0.
        across_K: 1 where ranks with the same parameters are on several nodes, else 0.
        weights_NWC: Weights of loads, of ranks on one node and on several; see
            :mod:`lightning_mist.tuner.load_weights`.
        is_alike: Whether all layers keep and hold the same.
    """

    pace: float
    layers_K: IntArray
    devices_K: IntArray
    recomputed_K: IntArray
    cell_K: IntArray
    order_K: IntArray
    forward_XK: FloatArray
    backward_XK: FloatArray
    forward_network_K: FloatArray
    backward_network_K: FloatArray
    outer_K: FloatArray
    reduce_XK: FloatArray
    arrival_K: FloatArray
    return_K: FloatArray
    saved_K: FloatArray
    whole_K: FloatArray
    top_K: FloatArray
    top_two_K: FloatArray
    working_XK: FloatArray
    parameters_XK: FloatArray
    gradients_XK: FloatArray
    optimizer_XK: FloatArray
    always_K: FloatArray
    copies_K: FloatArray
    across_K: IntArray
    weights_NWC: FloatArray
    is_alike: bool

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.layers_K)


def least_sums(values_L: FloatArray) -> FloatArray:
    """The least sum over any run of layers, by its length from none to all.

    Args:
        values_L: What each layer has.
    """
    if not len(values_L) or not np.ptp(values_L):
        multiples: FloatArray = np.arange(len(values_L) + 1) * np.float64(values_L[0] if len(values_L) else 0.0)
        return multiples
    prefix = np.concatenate([[0.0], np.cumsum(values_L)])
    return np.array([(prefix[length:] - prefix[: len(prefix) - length]).min() for length in range(len(prefix))])


def slots_of(
    space: Space, slot_of: Callable[[int, int, int, Shape], StageSlot], num_microbatches: int
) -> tuple[StageSlot, ...]:
    """A slot of a pipeline for every arrangement of devices that leaves some to other stages.

    Args:
        space: The search space.
        slot_of: A slot, by stage, number of stages and of microbatches, and arrangement.
        num_microbatches: Number of microbatches.
    """
    shapes = (shape for shape in space.shapes(num_microbatches) if shape.devices < space.world_size)
    return tuple(slot_of(1, 2, num_microbatches, shape) for shape in shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRuns:
    """Runs of layers on one arrangement of devices.

    Attributes:
        pace: Seconds per microbatch; runs that compute for longer are missing.
        of_zeros: What :class:`LeastRuns` has of them, by ZeRO stage.
    """

    pace: float
    of_zeros: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        """Number of runs."""
        return sum(len(runs["layers_K"]) for runs in self.of_zeros)


def slot_runs(model: StageCostModel, space: Space, slot: StageSlot, pace: float) -> SlotRuns:
    """All runs of layers on one arrangement of devices that compute for no longer than a pace.

    Args:
        model: The cost model.
        space: The search space.
        slot: A slot with that arrangement.
        pace: Seconds per microbatch.
    """
    of_shape = _OfShape(model, space, slot, pace)
    if not len(of_shape.layers_K):
        return SlotRuns(pace=pace, of_zeros=())
    zeros = sorted(set(space.search.zero_stages)) if slot.data_parallel_degree > 1 else [0]
    whatever_zero = of_shape.whatever_zero()
    of_zeros = tuple({**whatever_zero, **of_shape.runs(zero_stage)} for zero_stage in zeros)
    return SlotRuns(pace=pace, of_zeros=of_zeros)


def joined_runs(model: StageCostModel, num_layers: int, slots: Sequence[SlotRuns]) -> LeastRuns:
    """The runs of several arrangements of devices, up to the pace to which all are there.

    Args:
        model: The cost model.
        num_layers: Layers of the network.
        slots: The runs of every arrangement.
    """
    found = [of_zero for item in slots for of_zero in item.of_zeros]
    arrays: dict[str, Any] = {
        item.name: np.concatenate([runs[item.name] for runs in found], axis=-1) if found else np.empty(0)
        for item in fields(LeastRuns)
        if item.name.endswith("K") and item.name not in ("cell_K", "order_K")
    }
    interference = interference_of(model.profile, model.cluster)
    weights_NWC = np.stack([load_weights(interference, across_nodes) for across_nodes in (False, True)])
    cell_K = arrays["devices_K"] * num_layers + arrays["layers_K"]
    return LeastRuns(
        pace=min((item.pace for item in slots), default=np.inf),
        cell_K=cell_K,
        order_K=np.argsort(cell_K, kind="stable"),
        weights_NWC=weights_NWC,
        is_alike=_is_alike(model),
        **arrays,
    )


def _is_alike(model: StageCostModel) -> bool:
    """Whether every layer is like any other, as far as bytes are concerned."""
    costs, table = model.whole.costs(1), model.whole.holdings.table
    every = (costs.saved_R, costs.checkpointed_saved_R, table.used_R, table.trained_R)
    return not any(np.ptp(values_R[1:-1]) for values_R in every if len(values_R) > 2)


class _OfShape:
    """Runs of layers on one arrangement of devices.

    Args:
        model: The cost model.
        space: The search space.
        slot: A stage of a pipeline.
        pace: Seconds per microbatch.
    """

    def __init__(self, model: StageCostModel, space: Space, slot: StageSlot, pace: float) -> None:
        self.model, self.space, self.slot = model, space, slot
        self.memory = model.memory(self.slot)
        self.costs, self.holdings = self.memory.costs(self.slot.rows), self.memory.holdings
        self.degree, self.nodes = self.slot.shard_degree, shard_nodes(model.cluster, self.slot)
        tensor = self.slot.tensor_parallel_degree, self.slot.sequence_parallel
        self.compute = model.region_seconds(self.slot.whole_rows, *tensor)
        both_L = _of_layers(self.compute.forward_R + self.compute.backward_R)
        most = min(int(np.searchsorted(both_L, pace * ROOM, side="right")) - 1, space.num_layers - 1)
        index_K, self.recomputed_K = space.recomputed(np.arange(1, most + 1))
        self.layers_K = index_K + 1
        self.again_K = _of_layers(self.compute.forward_R)[self.recomputed_K]
        # A correction says of communication how much longer what is exposed of it takes.
        self.corrected = min(1.0, factor_of(model.profile.corrections, "communication"))

    def whatever_zero(self) -> dict[str, Any]:
        """What :class:`LeastRuns` has of them under any ZeRO stage."""
        every = np.ones(len(self.layers_K), dtype=np.int64)
        return {
            "layers_K": self.layers_K,
            "devices_K": every * self.slot.devices,
            "recomputed_K": self.recomputed_K,
            "always_K": every * float(self.memory.spec.buffer_bytes),
            "across_K": every * int(self.nodes > 1),
            **self._computed(),
            **self._transferred(every),
            **self._saved(),
        }

    def runs(self, zero_stage: int) -> dict[str, Any]:
        """What :class:`LeastRuns` has of them under a ZeRO stage beside that."""
        # Copies are priced with what is exposed of communication, and corrections change only one of both.
        is_told = (not self.holdings.is_one_unit or zero_stage < ZeroStage.PARAMETERS) and (
            not self.model.profile.corrections or zero_stage < ZeroStage.GRADIENTS
        )
        return {
            "copies_K": np.full(len(self.layers_K), float(is_told)),
            **self._exchanged(zero_stage),
            **self._states(zero_stage),
        }

    def _computed(self) -> dict[str, FloatArray]:
        """Seconds of computing."""
        forward_R, backward_R = self.compute.forward_R, self.compute.backward_R
        forward_L, backward_L = _of_layers(forward_R), _of_layers(backward_R)
        forward_XK: FloatArray = np.array(_edges(forward_R))[:, None] + forward_L[self.layers_K]
        backward_XK: FloatArray = np.array(_edges(backward_R))[:, None] + backward_L[self.layers_K]
        backward_XK += self.again_K
        return {"forward_XK": forward_XK, "backward_XK": backward_XK}

    def _transferred(self, every: IntArray) -> dict[str, FloatArray]:
        """Seconds of receiving what comes from the neighbours, over any cut."""
        cuts = np.arange(1, self.space.num_layers)
        ends = StageCandidates(start_K=cuts, end_K=cuts, checkpointed_K=0 * cuts, zero_stage_K=0 * cuts)
        found = transfers(*self._machine, self.slot, ends, self.memory)
        arrival, back = (float(seconds_C.min()) * self.corrected for seconds_C in found)
        return {"arrival_K": np.full(len(every), arrival), "return_K": np.full(len(every), back)}

    @property
    def _machine(self) -> tuple[HardwareProfile, Cluster]:
        return self.model.profile, self.model.cluster

    @cached_property
    def _units(self) -> UnitSeconds:
        return unit_seconds(self.model.profile, self.holdings.table, self.degree, self.nodes)

    def _exchanged(self, zero_stage: int) -> dict[str, FloatArray]:
        """Seconds of communicating among ranks with the same parameters."""
        unshard_L = scatter_L = np.zeros(self.space.num_layers + 1)
        outer = 0.0
        if self.degree > 1 and zero_stage >= ZeroStage.GRADIENTS:
            units = self._units
            scatter_L = _of_layers(units.reduce_FR.min(axis=0)) * self.corrected
            # Where all parameters are one unit they are unsharded once per batch.
            if zero_stage >= ZeroStage.PARAMETERS and not self.holdings.is_one_unit:
                unshard_L = _of_layers(units.unshard_R) * self.corrected
                outer = OUTERMOST * float(units.unshard_R.max())
        unshard_K = unshard_L[self.layers_K]
        return {
            "forward_network_K": unshard_K,
            "backward_network_K": unshard_K + scatter_L[self.layers_K],
            "outer_K": np.full(len(self.layers_K), outer),
            "reduce_XK": self._reduced(zero_stage),
        }

    def _reduced(self, zero_stage: int) -> FloatArray:
        """Seconds of averaging gradients after the last microbatch."""
        table = self.holdings.table
        single_L = _of_layers(table.single_R)
        if self.degree == 1 or zero_stage >= ZeroStage.GRADIENTS:
            return np.zeros((len(PLACES), len(self.layers_K)))
        operation, least = ("reduce", self.degree) if zero_stage >= ZeroStage.OPTIMIZER else ("all_reduce", 1)
        bytes_XL = np.array(_edges(table.trained_R))[:, None] + single_L
        calls_XL = np.maximum(least, np.ceil(bytes_XL / BUCKET_BYTES))
        args = self.model.profile, operation, self.degree, self.nodes
        found_XL: FloatArray = collective_seconds(*args, bytes_XL, calls_XL) * self.corrected
        return found_XL[:, self.layers_K]

    def _saved(self) -> dict[str, FloatArray]:
        """Bytes of what microbatches keep for backward, and of one moment of a backward."""
        costs, layers_K, recomputed_K = self.costs, self.layers_K, self.recomputed_K
        plain_L, kept_L = _of_layers(costs.saved_R), _of_layers(costs.checkpointed_saved_R)
        plain_K, kept_K = plain_L[layers_K - recomputed_K], kept_L[recomputed_K]
        handed = float(max(costs.handed_R.max(), costs.checkpointed_handed_R.max()))
        whole_K, is_plain_K = plain_K + kept_K, recomputed_K < layers_K
        top_K = np.where(is_plain_K, plain_L[1], kept_L[1])
        # The one below the top is recomputed if all but the top, or all, are.
        below_K = np.where(recomputed_K >= layers_K - 1, kept_L[1], plain_L[1]) * (layers_K > 1)
        # From ZeRO-2 on every backward makes gradients as a first one does.
        peak = min(map(_least, (costs.backward_peak_R, costs.first_backward_peak_R)))
        again_peak = min(map(_least, (costs.recompute_backward_peak_R, costs.first_recompute_backward_peak_R)))
        inner_K = whole_K + np.where(is_plain_K, peak, again_peak)
        inner_K = np.maximum(inner_K, np.where(recomputed_K > 0, kept_K + again_peak, 0.0))
        tails = (costs.backward_peak_R, costs.first_backward_peak_R, costs.recompute_backward_peak_R)
        tail_peak = min(values_R[-1] for values_R in (*tails, costs.first_recompute_backward_peak_R))
        tail_K = whole_K + costs.saved_R[-1] + tail_peak
        return {
            "saved_K": np.maximum(whole_K - handed, 0.0),
            "whole_K": whole_K,
            "top_K": top_K,
            "top_two_K": np.minimum(top_K + below_K, whole_K),
            "working_XK": np.maximum(np.stack([inner_K, inner_K, np.maximum(inner_K, tail_K)]), 0.0),
        }

    def _states(self, zero_stage: int) -> dict[str, FloatArray]:
        """Bytes of parameters, gradients and optimizer state of the rank that has most."""
        table, state = self.holdings.table, self.memory.spec.optimizer.state_bytes_per_parameter_byte
        single_K = _of_layers(table.single_R)[self.layers_K]
        held_XK = np.stack([single_K + edge for edge in _edges(table.trained_R)])
        names = {"parameters_XK": ZeroStage.PARAMETERS, "gradients_XK": ZeroStage.GRADIENTS}
        names["optimizer_XK"] = ZeroStage.OPTIMIZER
        return {
            name: held_XK * (state if name == "optimizer_XK" else 1.0) / (self.degree if zero_stage >= since else 1)
            for name, since in names.items()
        }


def _of_layers(values_R: FloatArray) -> FloatArray:
    """The least sums over runs of layers of what regions have."""
    return least_sums(values_R[1:-1])


def _least(values_R: FloatArray) -> float:
    """The least that any layer has."""
    return float(values_R[1:-1].min())


def _edges(values_R: FloatArray) -> tuple[float, float, float]:
    """What neither head nor tail adds, the head, the tail."""
    return 0.0, float(values_R[0]), float(values_R[-1])
