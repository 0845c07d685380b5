"""Seconds that context-parallel devices wait for keys and values of each other.

With degree ``c`` every device has the queries of ``1 / c`` of the sequence, and the keys and values of all of it pass
by in a ring (Liu et al., Ring Attention, 2023): ``c - 1`` times in a forward, each time beside the attention to the
block that is there already. In a backward keys and values go around again, and their gradients ``c`` times, back to
where they belong. Attention is what grows with the square of the sequence: with ``F(s)`` the FLOPs of a layer at a
sequence of ``s`` tokens, those beside which something travels are

    F(s) / c - F(s / c)

on each device, which does ``F(s) / c`` in all. Keys and values are taken for two hidden states, as
:mod:`lightning_mist.cost.inputs.regions` takes them; tensor-parallel devices have an equal part of the heads each.

Array axes
    K  candidates
    R  regions
"""

import numpy as np

from lightning_mist.cost.inputs import FloatArray, StageRegions, StageSlot, hidden_state_bytes, prefix_sums
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.time.overlap import concurrent_seconds, interference_of
from lightning_mist.cost.time.region_times import RegionSeconds, collective_seconds
from lightning_mist.hardware import Cluster, HardwareProfile

KEY_VALUE_STATES = 2
"""Hidden states that a block of keys and values is taken for."""


def ring_seconds(
    profile: HardwareProfile, cluster: Cluster, slot: StageSlot, memory: MemoryModel, compute: RegionSeconds
) -> tuple[FloatArray, FloatArray]:
    """What every region's forward and backward wait for in a ring, as far as attention does not hide it.

    Raises:
        PlanError: If the sequence cannot be shared out.
    """
    degree = slot.context_parallel_degree
    whole, part = memory.costs(slot.rows), memory.costs(slot.rows, degree)
    heads = 1 if slot.sequence_parallel else slot.tensor_parallel_degree
    block = KEY_VALUE_STATES * hidden_state_bytes(part) / heads
    nodes = ring_nodes(cluster, slot)
    # Keys and values travel together.
    step = float(collective_seconds(profile, "send_recv", 2, min(nodes, 2), block))
    interference = interference_of(profile, cluster)

    def exposed(name: str, steps: int) -> FloatArray:
        seconds_R, flops_R = getattr(compute, f"{name}_R"), getattr(whole, f"{name}_flops_R") / degree
        beside_R = np.maximum(flops_R - getattr(part, f"{name}_flops_R"), 0.0)
        attention_R = seconds_R * beside_R / np.maximum(flops_R, 1.0)
        ring_R = np.full(len(seconds_R), steps * step)
        ring_R[[0, -1]] = 0.0
        none_R = np.zeros_like(ring_R)
        both_R = concurrent_seconds(attention_R, ring_R, none_R, none_R, interference, nodes > 1)
        return np.where(ring_R > 0, np.maximum(both_R - attention_R, 0.0), 0.0)

    return exposed("forward", degree - 1), exposed("backward", 2 * degree - 1)


def ring_nodes(cluster: Cluster, slot: StageSlot) -> int:
    """Nodes that a ring spans: tensor- and context-parallel ranks are contiguous if nothing more is known."""
    if slot.placement is not None:
        return slot.placement.ring_nodes
    return -(-slot.context_parallel_degree * slot.tensor_parallel_degree // cluster.devices_per_node)


def stage_ring_seconds(
    seconds: tuple[FloatArray, FloatArray], regions: StageRegions, *, repeats: bool
) -> tuple[FloatArray, FloatArray]:
    """What stages wait for in one forward, and in one microbatch.

    Args:
        seconds: Of every region's forward and backward.
        repeats: Whether attention is recomputed with the rest, so that its keys and values go around again.
    """
    forward, backward = map(prefix_sums, seconds)
    forward_K = regions.sums(forward)
    both_K = forward_K + backward[regions.high_K] - backward[regions.low_K]
    return forward_K, both_K + regions.recomputed_sums(forward) if repeats else both_K
