"""Seconds of what stages exchange: across boundaries, among ranks with the same parameters, between tied copies.

Where the devices lie is known of a plan (:class:`~lightning_mist.cost.inputs.placement.Placement`). Of a slot of a
search it is taken for granted that the devices of a stage lie together, and that its neighbours are like it: ranks with
the same parameters lie in one node if the stage fits into it, and of stages of ``m`` devices on nodes of ``n`` every
``n / m``-th boundary goes to another node. As a microbatch passes every boundary once, each stage is charged with their
mean.

A pair of devices in different nodes is measured, or catalogued, with all devices of the node communicating. If fewer do
each gets more of the node's network, up to what a device can send inside its node. At a boundary those of one stage do.

Between unlike parts of a cluster there are two ends with networks of their own, and the slower one sets the pace. What
each of them does with nodes of other parts, and how many devices such a node has, is an end of its own (``seams``).

Array axes
    K  candidates
    R  units, which are regions
    J  first regions of stages, as far as they differ
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import (
    FloatArray,
    ParameterTable,
    StageCandidates,
    StageCrossing,
    StageSlot,
    covered,
    key_value_bytes,
)
from lightning_mist.cost.memory import HeldBytes, Holdings, MemoryModel
from lightning_mist.cost.time.overlap import beyond_computing, interference_of
from lightning_mist.cost.time.region_times import RegionSeconds, collective_seconds
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.plan import ZeroStage
from lightning_mist.plan.sharding import BUCKET_BYTES
from lightning_mist.plan.tensor_split import stripes_of

SeamEnd: TypeAlias = tuple[HardwareProfile, int]
"""What the devices of one part of a cluster do with nodes of other parts, and how many of them each node has."""

BY_PIECES = {"reduce": "reduce_scatter", "broadcast": "all_gather"}
"""What takes the place of an operation to or from owners where ranks have even pieces."""

EXCHANGED = ("transfer_K", "arrival_K", "return_K", "send_K", "send_back_K", "tied_K")
"""What stages exchange with other stages, of the terms of :class:`~lightning_mist.cost.time.StageSeconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """Seconds of what ranks with the same parameters exchange once per batch.

    Attributes:
        whole_K: Averaging gradients (up to ZeRO-1), hidden or not.
        exposed_K: As far as it does not hide in the last backward.
        gather_K: Giving out updated parameters (ZeRO-1 and ZeRO-2).
    """

    whole_K: FloatArray
    exposed_K: FloatArray
    gather_K: FloatArray


def shard_nodes(cluster: Cluster, slot: StageSlot) -> int:
    """Nodes that the ranks span that ZeRO shards over: all with the same parameters, or those of a group."""
    if slot.placement:
        return slot.placement.shard_nodes
    width, per_node = slot.shard_degree * slot.tensor_parallel_degree, cluster.devices_per_node
    # Of several groups one begins within a node, unless they fill nodes or nodes hold several.
    straddles = width < slot.devices and width % per_node > 0 and per_node % width > 0
    return min(_stage_nodes(cluster, slot), slot.shard_degree, -(-width // per_node) + straddles)


def replicate_nodes(cluster: Cluster, slot: StageSlot) -> int:
    """Nodes that the ranks span that own the same, one of each shard group."""
    if slot.placement:
        return slot.placement.replicate_nodes
    return min(_stage_nodes(cluster, slot), slot.num_peers // slot.shard_degree)


def _stage_nodes(cluster: Cluster, slot: StageSlot) -> int:
    return min(cluster.num_nodes, -(-slot.devices // cluster.devices_per_node))


def _outward(cluster: Cluster, slot: StageSlot) -> float:
    """Part of the boundaries that go to another node, and of a node's devices that use each of them."""
    return min(1.0, slot.devices / cluster.devices_per_node) if cluster.num_nodes > 1 else 0.0


def _over_seam(
    ends: Sequence[SeamEnd], inside_K: FloatArray, outside: Sequence[FloatArray], messages_K: FloatArray
) -> FloatArray:
    """Seconds of messages between two devices in unlike parts: those of the slower end.

    Args:
        inside_K: Bytes that a device sends as fast as it can inside its node, at most.
        outside: Those that it sends at its share of the network of its node, at every end.
    """
    slower_K: FloatArray = np.maximum.reduce(
        [collective_seconds(end, "send_recv", 2, 1, inside_K, messages_K) for end, _ in ends]
        + [
            collective_seconds(end, "send_recv", 2, 2, outside_K, messages_K)
            for (end, _), outside_K in zip(ends, outside, strict=True)
        ]
    )
    return slower_K


def reductions(
    profile: HardwareProfile,
    cluster: Cluster,
    slot: StageSlot,
    candidates: StageCandidates,
    held: HeldBytes,
    backward_K: FloatArray,
    *,
    even: bool = False,
) -> Reductions:
    """Seconds of reducing gradients and giving out parameters, of which ranks may have ``even`` pieces."""
    degree, zero_K, none_K = slot.shard_degree, candidates.zero_stage_K, np.zeros(len(candidates))
    whole_K = exposed_K = gather_K = none_K
    if degree > 1:
        machine, across = (profile, cluster), shard_nodes(cluster, slot) > 1
        shards_K = zero_K >= ZeroStage.OPTIMIZER
        reduce_K = bucketed_seconds(machine, slot, "reduce", held.trained_K, even=even)
        whole_K = np.where(shards_K, reduce_K, bucketed_seconds(machine, slot, "all_reduce", held.trained_K))
        whole_K *= zero_K < ZeroStage.GRADIENTS
        exposed_K = _exposed(profile, cluster, whole_K, held.trained_K, backward_K, across=across)
        gather_K = bucketed_seconds(machine, slot, "broadcast", held.trained_K, even=even)
        gather_K *= shards_K & (zero_K < ZeroStage.PARAMETERS)
    return Reductions(whole_K=whole_K, exposed_K=exposed_K, gather_K=gather_K)


def bucketed_seconds(
    machine: tuple[HardwareProfile, Cluster],
    slot: StageSlot,
    operation: str,
    trained_K: FloatArray,
    *,
    even: bool = False,
) -> FloatArray:
    """Seconds of a collective over the ranks that ZeRO shards over, bucket by bucket.

    Args:
        trained_K: Bytes of all of them.
        even: Whether ranks have even pieces.
    """
    profile, cluster = machine
    calls_K, group = np.maximum(1, np.ceil(trained_K / BUCKET_BYTES)), (slot.shard_degree, shard_nodes(cluster, slot))
    if even:
        operation = BY_PIECES.get(operation, operation)
    elif operation in BY_PIECES:
        calls_K = np.maximum(slot.shard_degree, calls_K)  # Every owner has a bucket of its own at least.
    return collective_seconds(profile, operation, *group, trained_K, calls_K)


def unit_seconds(
    profile: HardwareProfile, table: ParameterTable, degree: int, nodes: int, *, even: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Seconds in which every unit's communication among the data-parallel ranks of its stage happens.

    Args:
        even: Whether they have even pieces.

    Returns:
        Giving out its parameters, from their owners, or who has pieces, to all, with axis ``R``; and reducing the
        gradients that are complete with it, from all to these, with axes ``JR``.
    """

    def seconds(operation: str, bytes_R: FloatArray, count_R: FloatArray) -> FloatArray:
        # Every owner sends what it owns of a unit as one message.
        operation, calls = (BY_PIECES[operation], 1.0) if even else (operation, np.minimum(degree, count_R))
        found_R = collective_seconds(profile, operation, degree, nodes, bytes_R, calls)
        return found_R + profile.overheads.unit_seconds * (degree > 1) * (bytes_R > 0)

    return (
        seconds("broadcast", table.used_R, table.count_R),
        seconds("reduce", table.reduced_JR, table.reductions_JR),
    )


def replicate_seconds(
    profile: HardwareProfile, cluster: Cluster, slot: StageSlot, candidates: StageCandidates, holdings: Holdings
) -> FloatArray:
    """Seconds of summing gradients, once per batch, over the groups that ZeRO shards within: what a rank owns of them.

    Nothing hides it, as it follows the last reduction within a group. From ZeRO-2 on sums travel, in their own type and
    unit by unit; below, what has arrived, bucket by bucket.
    """
    groups = slot.num_peers // slot.shard_degree
    if groups == 1:
        return np.zeros(len(candidates))
    owned_K = holdings.shares(candidates, slot.shard_degree).trained_K
    are_sums_K = candidates.zero_stage_K >= ZeroStage.GRADIENTS
    low_K, high_K = covered(holdings.spec, candidates.start_K, candidates.end_K)
    units_K = np.ones(len(candidates)) if holdings.is_one_unit else high_K - low_K
    calls_K = np.where(are_sums_K, units_K, np.maximum(1.0, np.ceil(owned_K / BUCKET_BYTES)))
    factor = holdings.spec.optimizer.gradient_bytes_per_parameter_byte
    payload_K = owned_K * np.where(are_sums_K, factor, 1.0)
    return collective_seconds(profile, "all_reduce", groups, replicate_nodes(cluster, slot), payload_K, calls_K)


def tied_seconds(
    profile: HardwareProfile,
    cluster: Cluster,
    slot: StageSlot,
    held: HeldBytes,
    seams: Sequence[SeamEnd] = (),
) -> FloatArray:
    """Seconds of summing gradients of parameters that several stages hold.

    Args:
        seams: What devices of every part of a cluster do with nodes of other parts; nothing if devices are alike.
    """
    if slot.num_stages == 1 or not held.shared_K.any():
        return np.zeros_like(held.shared_K)
    ends = _ends(slot, seams, 0, slot.num_stages - 1)
    if ends:
        return np.maximum(*(collective_seconds(end, "all_reduce", 2, 2, held.shared_K) for end, _ in ends))
    nodes = slot.placement.tied_nodes if slot.placement else min(2, cluster.num_nodes)
    return collective_seconds(profile, "all_reduce", 2, nodes, held.shared_K)


def _exposed(
    profile: HardwareProfile,
    cluster: Cluster,
    reduce_K: FloatArray,
    payload_K: FloatArray,
    backward_K: FloatArray,
    *,
    across: bool,
) -> FloatArray:
    """What of a reduction does not hide in the last backward: on a device at least its last bucket."""
    interference = interference_of(profile, cluster)
    if interference is None:
        return reduce_K
    last_K = reduce_K * np.minimum(1.0, BUCKET_BYTES / np.maximum(payload_K, 1.0))
    return np.maximum(beyond_computing(backward_K, reduce_K, interference, across), last_K)


def cut_seconds(
    profile: HardwareProfile,
    cluster: Cluster,
    slot: StageSlot,
    memory: MemoryModel,
    *,
    sending: bool,
    seams: Sequence[SeamEnd],
) -> tuple[FloatArray, FloatArray]:
    """What the activation and the gradient that a stage receives, or sends, take by the cut that they cross."""
    costs = memory.costs(slot.rows, slot.context_parallel_degree)
    before, behind = (slot.placement.before, slot.placement.behind) if slot.placement else (None, None)
    index = slot.stage_index
    sides = (behind, _ends(slot, seams, index, index + 1)), (before, _ends(slot, seams, index - 1, index))
    activation, gradient = sides if sending else sides[::-1]
    return (
        _crossing_seconds(profile, cluster, slot, *activation, costs.boundary_by_cut, _tensors(memory)),
        _crossing_seconds(
            profile, cluster, slot, *gradient, costs.gradient_boundary_by_cut, _tensors(memory, trained=True)
        ),
    )


def cut_key(cluster: Cluster, slot: StageSlot) -> Hashable:
    """Equal for slots of one tensor-parallel degree whose :func:`cut_seconds` are equal."""
    placement = slot.placement
    place = None if placement is None else (placement.share, placement.before, placement.behind)
    return slot.rows, slot.context_parallel_degree, _outward(cluster, slot), slot.devices, slot.seams, place


def _ends(slot: StageSlot, seams: Sequence[SeamEnd], first: int, second: int) -> tuple[SeamEnd, ...]:
    """What the devices of two stages do with other parts, if the stages exist and lie in unlike parts."""
    if not seams or first < 0 or second >= slot.num_stages:
        return ()
    parts = slot.seam(first, second)
    return () if parts is None else tuple(seams[part] for part in parts)


def _tensors(memory: MemoryModel, *, trained: bool = False) -> FloatArray:
    """Tensors that cross each cut; if ``trained``, those whose gradients go back."""
    spec = memory.spec
    counts = [sum(tensor.requires_grad or not trained for tensor in tensors) for tensors in spec.boundaries]
    return np.array([0.0, *counts, 0.0][: spec.num_layers + 1])


def _mean_crossing(
    profile: HardwareProfile, cluster: Cluster, slot: StageSlot, payload: FloatArray, tensors: FloatArray
) -> FloatArray:
    """Seconds of a boundary of a pipeline of which nobody knows where it lies: the mean over boundaries."""
    inside = collective_seconds(profile, "send_recv", 2, 1, payload, tensors)
    share = _outward(cluster, slot)
    if not share:
        return inside
    across = collective_seconds(profile, "send_recv", 2, 2, payload * share, tensors)
    return inside + share * np.maximum(0.0, across - inside)


def _crossing_seconds(
    profile: HardwareProfile,
    cluster: Cluster,
    slot: StageSlot,
    crossing: StageCrossing | None,
    seam: Sequence[SeamEnd],
    payload: FloatArray,
    tensors: FloatArray,
) -> FloatArray:
    if seam and crossing is None:
        # As many devices use the network of the other end's node.
        loads = [payload * min(1.0, slot.devices / per_node) for _, per_node in seam]
        return _over_seam(seam, payload, loads, tensors)
    if slot.placement is None or crossing is None:
        return _mean_crossing(profile, cluster, slot, payload, tensors)
    own = crossing is slot.placement.before
    ends = (
        (crossing.sent, crossing.sent_messages, crossing.sent * crossing.sharing),
        (crossing.received, crossing.received_messages, crossing.received * crossing.receiving),
    )
    if seam:
        # Both ends wait for the slower one, on a CPU too.
        share, count = (max(end[place] for end in ends) for place in (0, 1))
        whole, pieces = payload / slot.placement.share, tensors * count
        return _over_seam(seam, whole * share, [whole * end[2] for end in ends], pieces)
    # On a device both ends are busy until the last has what it gets; on a CPU each works for what it moves itself.
    part, messages, load = ends[own] if cluster.device.kind == "cpu" else map(max, *ends)
    whole, pieces = payload / slot.placement.share, tensors * messages
    inside = collective_seconds(profile, "send_recv", 2, 1, whole * part, pieces)
    if not crossing.across:
        return inside
    across = collective_seconds(profile, "send_recv", 2, 2, whole * load, pieces)
    return np.maximum(inside, across)


# Seconds that context-parallel devices exchange keys and values for attention, and wait for each other.
#
# With degree ``c`` every device has the queries of ``1 / c`` of the sequence, gathers keys and values of all of it in
# a forward, one collective each, and scatters the sums of their gradients in a backward. All of them wait meanwhile.
# Where layers are recomputed keys and values are gathered again.
#
# Attention is what grows with the square of the sequence: with ``F(s)`` the FLOPs of a layer at a sequence of ``s``
# tokens, a device has ``F(s) / c`` of them, of which ``(F(s) / c - F(s / c)) / (1 - 1 / c)`` are attention's. Behind
# a causal mask the device with the last tokens of each of ``k`` stripes does ``1 + (1 - 1 / c) / k`` times what each
# would if it were even, and the others wait for it: so what this adds is ``(F(s) / c - F(s / c)) / k``. What comes
# before the first layer every device computes whole.


def context_seconds(
    profile: HardwareProfile, cluster: Cluster, slot: StageSlot, memory: MemoryModel, compute: RegionSeconds
) -> tuple[FloatArray, FloatArray]:
    """What sharing rows adds to every region's forward and backward.

    Raises:
        PlanError: If the sequence cannot be shared out.
    """
    degree, nodes = slot.context_parallel_degree, context_nodes(cluster, slot)
    whole, part = memory.costs(slot.rows), memory.costs(slot.rows, degree)
    keys_R = key_value_bytes(memory.spec, whole)
    stripes = stripes_of(memory.spec.sequence_length or 0, degree)

    def added(name: str, operation: str) -> FloatArray:
        seconds_R, flops_R = getattr(compute, f"{name}_R"), getattr(whole, f"{name}_flops_R") / degree
        uneven_R = np.maximum(flops_R - getattr(part, f"{name}_flops_R"), 0.0) * whole.is_causal_R / stripes
        exchange_R = collective_seconds(profile, operation, degree, nodes, keys_R, 2)
        found_R: FloatArray = exchange_R + seconds_R * uneven_R / np.maximum(flops_R, 1.0)
        found_R[0] = seconds_R[0] * (degree - 1)
        found_R[-1] = 0.0
        return found_R

    return added("forward", "all_gather"), added("backward", "reduce_scatter")


def context_nodes(cluster: Cluster, slot: StageSlot) -> int:
    """Nodes of the ranks that share rows: tensor- and context-parallel ranks are contiguous if nothing is known."""
    if slot.placement is not None:
        return slot.placement.ring_nodes
    return -(-slot.context_parallel_degree * slot.tensor_parallel_degree // cluster.devices_per_node)
