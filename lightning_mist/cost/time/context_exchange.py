"""Seconds that context-parallel devices exchange keys and values for attention, and wait for each other.

With degree ``c`` every device has the queries of ``1 / c`` of the sequence, gathers keys and values of all of it in a
forward, one collective each, and scatters the sums of their gradients in a backward. All of them wait meanwhile. Where
layers are recomputed keys and values are gathered again.

Attention is what grows with the square of the sequence: with ``F(s)`` the FLOPs of a layer at a sequence of ``s``
tokens, a device has ``F(s) / c`` of them, of which ``(F(s) / c - F(s / c)) / (1 - 1 / c)`` are attention's. Behind a
causal mask the device with the last tokens of each of ``k`` stripes does ``1 + (1 - 1 / c) / k`` times what each would
if it were even, and the others wait for it: so what this adds is ``(F(s) / c - F(s / c)) / k``. What comes before the
first layer every device computes whole.

Array axes
    K  candidates
    R  regions
"""

import numpy as np

from lightning_mist.cost.inputs import FloatArray, StageRegions, StageSlot, key_value_bytes
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.time.region_times import RegionSeconds, collective_seconds
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.plan.tensor_split import stripes_of


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


def stage_context_seconds(
    seconds: tuple[FloatArray, FloatArray], regions: StageRegions
) -> tuple[FloatArray, FloatArray]:
    """What this adds to one forward of stages, and to one microbatch.

    Args:
        seconds: Of every region's forward and backward.
    """
    forward_R, backward_R = seconds
    return regions.sums(forward_R), regions.sums(forward_R + backward_R) + regions.recomputed_sums(forward_R)
