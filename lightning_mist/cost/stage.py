"""What stages cost: candidates in, arrays of seconds and bytes out.

Steady time ``t`` of a stage: forward and backward of one microbatch, one more forward of every recomputed layer, and
the transfers that it waits for; from ZeRO-2 on also the reduction of its gradients, under ZeRO-3 the unsharding of its
parameters (:mod:`lightning_mist.cost.shards`). A pipeline with as many microbatches in flight as it has stages passes
one of them around the loop of all stages in ``sum t_i`` and two transfers per boundary, so each stage is charged with
receiving its input and the gradient of its output.

Boundary time ``d``: averaging gradients over the data-parallel ranks, summing those of tied parameters, the optimizer's
step, and under ZeRO-1 and ZeRO-2 giving out the updated parameters. On a device the reduction runs beside the last
backward, and what cannot hide there counts; on a CPU both use the same cores, so all of it counts.

Array axes
    K  candidates
    R  regions
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.compile import FloatArray
from lightning_mist.cost.corrected import corrected_regions, corrected_terms
from lightning_mist.cost.held import HeldBytes
from lightning_mist.cost.memory import BUCKET_BYTES, MemoryModel
from lightning_mist.cost.needs import StageNeeds
from lightning_mist.cost.regions import covered
from lightning_mist.cost.shards import UnitSeconds, exposed_seconds, unit_seconds
from lightning_mist.cost.time import RegionSeconds, collective_seconds, region_seconds, split_seconds
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ZeroStage

OPERATORS_PER_PARAMETER = 10
"""Operators of a step in a loop over parameters: ``_single_tensor_adam`` in ``torch/optim/adam.py`` launches ten."""

GRADIENT_PASSES = 2
"""Times that complete gradients are read and written on their way to the optimizer: scaled to a mean, and by the
gradient that arrives at the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of candidates by term.

    Attributes:
        forward_K: Forward of one microbatch.
        backward_K: Backward of one microbatch without recomputation.
        recompute_K: Forwards that backward repeats.
        weight_K: The part of ``backward_K`` that makes gradients of matrices, which ZB-H1 puts off.
        transfer_K: Receiving the input and the gradient of the output.
        arrival_K: The part of ``transfer_K`` that is about the input.
        unshard_K: Unsharding parameters for one microbatch (ZeRO-3), as far as it does not hide in computation.
        scatter_K: Reducing the gradients of one microbatch to their owners (from ZeRO-2 on), as far as not hidden.
        ring_K: Exchanging keys and values among context-parallel ranks for one microbatch, as far as not hidden.
        forward_ring_K: The part of ``ring_K`` that belongs to the forward.
        copies_K: Copies between device and host for one microbatch, as far as not hidden.
        forward_copies_K: The part of ``copies_K`` that belongs to the forward.
        reduce_K: Averaging gradients over the data-parallel ranks, as far as it does not hide in the last backward.
        tied_K: Summing gradients of parameters that several stages hold.
        update_K: The optimizer's step.
        update_copies_K: Copies between device and host that the optimizer's step waits for.
        gather_K: Giving out updated parameters.
    """

    forward_K: FloatArray
    backward_K: FloatArray
    recompute_K: FloatArray
    weight_K: FloatArray
    transfer_K: FloatArray
    arrival_K: FloatArray
    unshard_K: FloatArray
    scatter_K: FloatArray
    ring_K: FloatArray
    forward_ring_K: FloatArray
    copies_K: FloatArray
    forward_copies_K: FloatArray
    reduce_K: FloatArray
    tied_K: FloatArray
    update_K: FloatArray
    update_copies_K: FloatArray
    gather_K: FloatArray

    @property
    def steady_K(self) -> FloatArray:
        """Steady time ``t``."""
        computed_K = self.forward_K + self.backward_K + self.recompute_K
        exchanged_K = self.transfer_K + self.unshard_K + self.scatter_K + self.ring_K
        return computed_K + exchanged_K + self.copies_K

    @property
    def boundary_K(self) -> FloatArray:
        """Boundary time ``d``."""
        return self.reduce_K + self.tied_K + self.update_K + self.update_copies_K + self.gather_K


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What each candidate costs: steady and boundary seconds, and what its memory is made of."""

    steady_K: FloatArray
    boundary_K: FloatArray
    needs: StageNeeds


class _Rank:
    """What one rank of a stage costs under one degree of tensor parallelism; keeps what it has computed."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.memory = spec, MemoryModel(spec)
        self.seconds: dict[float, RegionSeconds] = {}
        self.units: dict[int, UnitSeconds] = {}
        self.tensors_C = np.array([0, *(len(tensors) for tensors in spec.boundaries), 0][: spec.num_layers + 1])


class StageCostModel:
    """Seconds and bytes of stages of one network on one machine; keeps what it has computed.

    Args:
        spec: The network.
        profile: How fast the machine is.
        cluster: How many devices it has.
    """

    def __init__(self, spec: ModelSpec, profile: HardwareProfile, cluster: Cluster) -> None:
        self.spec, self.profile, self.cluster = spec, profile, cluster
        self._ranks: dict[tuple[int, bool], _Rank] = {}

    def _rank(self, degree: int, sequence: bool) -> _Rank:
        if (degree, sequence) not in self._ranks:
            self._ranks[degree, sequence] = _Rank(self.spec.split(degree, sequence))
        return self._ranks[degree, sequence]

    def _of(self, slot: StageSlot) -> _Rank:
        return self._rank(slot.tensor_parallel_degree, slot.sequence_parallel)

    def memory(self, slot: StageSlot) -> MemoryModel:
        """What stages of a slot's tensor-parallel degree hold.

        Raises:
            PlanError: If the costs of that degree are not known.
        """
        return self._of(slot).memory

    @property
    def whole(self) -> MemoryModel:
        """What the network holds and does where nothing is split."""
        return self._rank(1, False).memory

    def region_seconds(self, rows: float, degree: int = 1, sequence: bool = False) -> RegionSeconds:
        """Seconds of every region at a number of rows.

        Args:
            rows: Microbatch rows.
            degree: Tensor-parallel ranks, whose exchanges are included.
            sequence: Whether these are sequence-parallel too.
        """
        rank = self._rank(degree, sequence)
        if rows not in rank.seconds:
            costs, whole = rank.memory.costs(rows), self._rank(1, False).memory.costs(rows)
            seconds = (
                region_seconds(self.spec, self.profile, self.cluster, costs, rows)
                if degree == 1
                else split_seconds((self.spec, rank.spec), self.profile, self.cluster, (whole, costs), rows, degree)
            )
            rank.seconds[rows] = corrected_regions(self.spec, self.profile, seconds)
        return rank.seconds[rows]

    def evaluate(self, slot: StageSlot, candidates: StageCandidates) -> StageCosts:
        """Seconds and bytes of candidates for a slot."""
        seconds = self.seconds(slot, candidates)
        return StageCosts(
            steady_K=seconds.steady_K,
            boundary_K=seconds.boundary_K,
            needs=self.memory(slot).needs(slot, candidates),
        )

    def seconds(self, slot: StageSlot, candidates: StageCandidates) -> StageSeconds:
        """Seconds of candidates for a slot, by term."""
        seconds = self.region_seconds(slot.rows, slot.tensor_parallel_degree, slot.sequence_parallel)
        low_K, high_K = covered(self.spec, candidates.start_K, candidates.end_K)
        forward_sum, backward_sum = _prefix(seconds.forward_R), _prefix(seconds.backward_R)
        first_K = candidates.start_K + 1
        backward_K = backward_sum[high_K] - backward_sum[low_K]
        unshard_K, scatter_K = self._shards(slot, candidates, seconds)
        arrival_K, return_K = self._transfers(slot, candidates)
        weight_sum = _prefix(self._weights(slot) * seconds.backward_R)
        reduce_K, tied_K, update_K, gather_K = self._boundary(slot, candidates, backward_K)
        none_K = np.zeros(len(candidates))
        found = StageSeconds(
            forward_K=forward_sum[high_K] - forward_sum[low_K],
            backward_K=backward_K,
            recompute_K=forward_sum[first_K + candidates.checkpointed_K] - forward_sum[first_K],
            weight_K=weight_sum[high_K] - weight_sum[low_K],
            transfer_K=arrival_K + return_K,
            arrival_K=arrival_K,
            unshard_K=unshard_K,
            scatter_K=scatter_K,
            ring_K=none_K,
            forward_ring_K=none_K,
            copies_K=none_K,
            forward_copies_K=none_K,
            reduce_K=reduce_K,
            tied_K=tied_K,
            update_K=update_K,
            update_copies_K=none_K,
            gather_K=gather_K,
        )
        return corrected_terms(self.profile, found)

    def _shards(
        self, slot: StageSlot, candidates: StageCandidates, seconds: RegionSeconds
    ) -> tuple[FloatArray, FloatArray]:
        """Unsharding and reducing of every microbatch."""
        degree = slot.data_parallel_degree
        if degree == 1 or candidates.zero_stage_K.max(initial=0) < ZeroStage.GRADIENTS:
            return np.zeros(len(candidates)), np.zeros(len(candidates))
        rank = self._of(slot)
        if degree not in rank.units:
            table = rank.memory.holdings.table
            rank.units[degree] = unit_seconds(self.profile, table, degree, self._nodes(degree))
        low_K, high_K = covered(self.spec, candidates.start_K, candidates.end_K)
        return exposed_seconds(
            seconds,
            rank.units[degree],
            candidates,
            low_K,
            high_K,
            overlaps=self.cluster.device.kind == "cuda",
        )

    def _nodes(self, degree: int) -> int:
        """Nodes that data-parallel ranks span: a replica of the pipeline is contiguous, so they spread over all."""
        return min(self.cluster.num_nodes, degree)

    def _weights(self, slot: StageSlot) -> FloatArray:
        """Share of every region's backward that makes gradients of matrices, by FLOPs."""
        costs = self.memory(slot).costs(slot.rows)
        share_R: FloatArray = np.minimum(1.0, costs.weight_flops_R / np.maximum(costs.backward_flops_R, 1.0))
        return share_R

    def _transfers(self, slot: StageSlot, candidates: StageCandidates) -> tuple[FloatArray, FloatArray]:
        """Receiving the input, and the gradient of the output."""
        if slot.num_stages == 1:
            return np.zeros(len(candidates)), np.zeros(len(candidates))
        rank = self._of(slot)
        costs = rank.memory.costs(slot.rows)
        nodes = 1 if slot.num_stages <= self.cluster.devices_per_node else 2
        # Every live tensor is a message of its own.
        arrival_C, return_C = (
            collective_seconds(self.profile, "send_recv", 2, nodes, payload_C, rank.tensors_C)
            for payload_C in (costs.boundary_C, costs.gradient_boundary_C)
        )
        return arrival_C[candidates.start_K], return_C[candidates.end_K]

    def _boundary(
        self, slot: StageSlot, candidates: StageCandidates, backward_K: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Seconds of reduction, tied gradients, update and gathering."""
        holdings, degree = self.memory(slot).holdings, slot.data_parallel_degree
        held = holdings.of(candidates)
        zero_K = candidates.zero_stage_K
        sharded_K = (zero_K >= ZeroStage.OPTIMIZER) & (degree > 1)
        owned_K = held.trained_K
        reduce_K, gather_K = np.zeros(len(candidates)), np.zeros(len(candidates))
        if degree > 1:
            owned_K = np.where(sharded_K, holdings.shares(candidates, degree).trained_K, held.trained_K)
            nodes = self._nodes(degree)
            whole_K = self._bucketed("all_reduce", degree, nodes, held.trained_K)
            owners_K = self._bucketed("reduce", degree, nodes, held.trained_K, messages=degree)
            reduce_K = self._exposed(np.where(sharded_K, owners_K, whole_K), held.trained_K, backward_K)
            reduce_K = np.where(zero_K >= ZeroStage.GRADIENTS, 0.0, reduce_K)
            given_K = self._bucketed("broadcast", degree, nodes, held.trained_K, messages=degree)
            gather_K = np.where(sharded_K & (zero_K < ZeroStage.PARAMETERS), given_K, 0.0)
        tied_K = np.zeros(len(candidates))
        if slot.num_stages > 1:
            nodes = 1 if slot.num_stages <= self.cluster.devices_per_node else 2
            tied_K = collective_seconds(self.profile, "all_reduce", 2, nodes, held.shared_K)
        kept_K = np.where((zero_K >= ZeroStage.GRADIENTS) & (degree > 1), owned_K, held.trained_K)
        return reduce_K, tied_K, self._update(held, kept_K, owned_K), gather_K

    def _bucketed(
        self, operation: str, degree: int, nodes: int, payload_K: FloatArray, messages: int = 1
    ) -> FloatArray:
        """A collective over flat buckets: at least ``messages`` of them."""
        calls_K = np.maximum(messages, np.ceil(payload_K / BUCKET_BYTES))
        return collective_seconds(self.profile, operation, degree, nodes, payload_K, calls_K)

    def _exposed(self, reduce_K: FloatArray, payload_K: FloatArray, backward_K: FloatArray) -> FloatArray:
        """What of a reduction does not hide in the last backward: on a device at least its last bucket."""
        if self.cluster.device.kind != "cuda":
            return reduce_K
        last_K = reduce_K * np.minimum(1.0, BUCKET_BYTES / np.maximum(payload_K, 1.0))
        return np.maximum(reduce_K - backward_K, last_K)

    def _update(self, held: HeldBytes, gradients_K: FloatArray, owned_K: FloatArray) -> FloatArray:
        """The optimizer's step over the owned parameters, and the passes over gradients before it."""
        optimizer = self.spec.optimizer
        moved_K = optimizer.step_moved_bytes_per_parameter_byte * owned_K + 2 * GRADIENT_PASSES * gradients_K
        # Only the loop implementations have temporaries of the size of one parameter.
        is_loop = optimizer.step_peak_bytes_per_largest > 0
        count_K = held.count_K * owned_K / np.maximum(held.trained_K, 1.0)
        operators_K = OPERATORS_PER_PARAMETER * (count_K if is_loop else np.minimum(held.count_K, 1.0))
        busy_K = moved_K / self.profile.memory_bytes_per_second
        launch_K = operators_K * self.profile.operator_seconds
        result_K: FloatArray = np.maximum(busy_K, launch_K) if self.cluster.device.kind == "cuda" else busy_K + launch_K
        return result_K


def _prefix(values_R: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values_R)])
