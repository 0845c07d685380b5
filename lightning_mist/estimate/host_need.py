"""What a plan's offload takes of the memory of the hosts."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_mist.hardware import AnyCluster, host_memory, usable_host_bytes
from lightning_mist.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """The node on which offload takes most of what it may.

    Attributes:
        bytes: What all of its processes hold there together.
        usable: Bytes that offload may take of the node; what is beyond is for the system and the processes themselves.
        there: Bytes that the node has in all.
    """

    bytes: int
    usable: int
    there: int


def host_need(cluster: AnyCluster, plan: Plan, held: Mapping[int, int]) -> HostNeed | None:
    """The node on which offload takes most of what it may.

    None if none takes any, nothing is known of the hosts, or devices are CPUs, which offload into files.

    Args:
        held: Bytes of host memory of each process, by the group of devices it belongs to.
    """
    if cluster.kind != "cuda":
        return None
    nodes: dict[tuple[int, int], int] = {}
    for group in range(plan.num_groups):
        for rank in plan.stages[group].devices if held[group] else ():
            part = cluster.part_of(rank)
            node = part, (rank - cluster.offsets[part]) // cluster.parts[part].devices_per_node
            nodes[node] = nodes.get(node, 0) + held[group]
    found = []
    for (index, _), nbytes in nodes.items():
        there, usable = host_memory(cluster.parts[index]), usable_host_bytes(cluster.parts[index])
        if there is not None:
            found.append(HostNeed(bytes=nbytes, usable=int(usable), there=there))
    return max(found, key=lambda need: need.bytes / max(need.usable, 1), default=None)
