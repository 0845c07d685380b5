"""What of a device's memory, and of its host's, is left for the tensors of a plan."""

from collections.abc import Iterator, Sequence

from lightning_mist.hardware import USABLE_HOST_MEMORY, AnyCluster, Cluster, host_memory, usable_host_bytes
from lightning_mist.plan import Plan
from lightning_mist.units import format_bytes

USABLE_MEMORY = 0.8
"""Share of a device's memory that plans use by default. What a prediction leaves out (context, communicators,
fragmentation) stayed below a quarter of it in all 454 runs of Fujii, Watanabe and Yokota, 2024 (arXiv 2411.06465)."""


def usable_bytes(cluster: Cluster, memory_limit: int | None) -> float:
    """Bytes that tensors of a plan may take on each device.

    A limit is about everything that a device has in use, so that on CUDA devices :data:`USABLE_MEMORY` of it is left
    for tensors; of a CPU's processes tensors are all that is counted. Without a limit it is that share of the memory.
    """
    if memory_limit is None:
        return USABLE_MEMORY * cluster.device.memory_bytes
    return float(memory_limit) * tensor_share(cluster)


def check_memory_limit(cluster: AnyCluster, memory_limit: int | None) -> None:
    """Refuse a limit of more memory than any device has.

    Args:
        memory_limit: Bytes of each device that may be used in all; None for all that it has.

    Raises:
        ValueError: If the limit is not between nothing and a device's memory.
    """
    most = max(part.device.memory_bytes for part in cluster.parts)
    if memory_limit is not None and not 0 < memory_limit <= most:
        raise ValueError(
            f"memory_limit = {format_bytes(memory_limit)}: more than nothing and at most the {format_bytes(most)} of a "
            "device; leave it out to plan with all of it"
        )


def usable_of_parts(cluster: AnyCluster, memory_limit: int | None) -> tuple[float, ...]:
    """Bytes that tensors may take on each device of every part: of one limit for unlike ones at most what it has."""
    limits = [memory_limit for _ in cluster.parts]
    if memory_limit is not None and len(limits) > 1:
        limits = [min(memory_limit, part.device.memory_bytes) for part in cluster.parts]
    return tuple(map(usable_bytes, cluster.parts, limits))


def least_of_stages(plan: Plan, cluster: AnyCluster, of_parts: Sequence[float]) -> tuple[float, ...]:
    """Of what every part has the least for the devices of every stage."""
    return tuple(min(of_parts[cluster.part_of(device)] for device in stage.devices) for stage in plan.stages)


def tensor_share(cluster: AnyCluster) -> float:
    """The share of a memory limit that is left for tensors."""
    return USABLE_MEMORY if cluster.kind == "cuda" else 1.0


def host_bytes_of_each(cluster: AnyCluster, host_memory_limit: int | None) -> float:
    """Bytes of host memory that each device may use for what it offloads.

    Args:
        cluster: The devices; of unlike ones those count that have least.
        host_memory_limit: Bytes of each node, which all its devices share equally; None for what plans use of the
            host's, see :func:`~lightning_mist.hardware.host_share.usable_host_bytes`.

    Returns:
        The bytes; infinite if there is no limit and nothing is known of the hosts.

    Raises:
        ValueError: If the limit is negative.
    """
    if host_memory_limit is None:
        return min(usable_host_bytes(part) / part.devices_per_node for part in cluster.parts)
    if host_memory_limit < 0:
        raise ValueError(
            f"host_memory_limit={host_memory_limit}: bytes of host memory of a node are not negative; give 0 for no "
            "offload, or None for what the hosts have"
        )
    return host_memory_limit / max(part.devices_per_node for part in cluster.parts)


def host_notes(cluster: AnyCluster, host_memory_limit: int | None) -> Iterator[str]:
    """What offloading may take of each node's memory, for people, where nobody has said it.

    Args:
        host_memory_limit: Bytes of each node that offloading may take, if they were given.
    """
    parts = cluster.parts if host_memory_limit is None else ()
    yield from dict.fromkeys(_host_note(part) for part in parts)


def _host_note(part: Cluster) -> str:
    there, node = host_memory(part), f"a node of {part.devices_per_node} {part.device.name}"
    if there is None:
        return (
            f"offload takes as much host memory as it wants: how much {node} has is not known; give host_memory_limit, "
            "or host_memory in the description of the cluster"
        )
    source = "the catalog's " if part.host_memory_bytes is None else ""
    rest = "the system, the processes themselves and files that are written"
    if part.kind != "cuda":
        rest += ", and the processes' tensors are taken off"
    return (
        f"host_memory_limit is {format_bytes(usable_host_bytes(part))} per node, {USABLE_HOST_MEMORY:.0%} of {source}"
        f"{format_bytes(there)} of {node}: the rest is for {rest}"
    )
