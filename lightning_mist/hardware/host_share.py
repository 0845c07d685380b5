"""How much of a host's memory what is offloaded may take."""

from dataclasses import replace
from math import ceil

from lightning_mist.hardware.catalog import host_memory
from lightning_mist.hardware.cluster import AnyCluster, Cluster

USABLE_HOST_MEMORY = 0.8
"""Share of a host's memory that plans use by default. Of the rest, 5 % are the system's (as GKE reserves on premises:
cloud.google.com/anthos, "Resources available for your workloads"); 4 % are the processes' own on the smallest host of
the catalog, 64 GiB for one device (2 GiB with torch and CUDA: github.com/pytorch/pytorch issue 113326); and 10 % may be
pages of files that are being written, such as checkpoints (``dirty_background_ratio`` of Linux)."""


def usable_host_bytes(part: Cluster) -> float:
    """Bytes of its host's memory that the devices of a node together may use; infinite if nothing is known of it.

    This is :data:`USABLE_HOST_MEMORY` of it, less what the devices themselves are there of a CPU's processes.
    """
    there = host_memory(part)
    if there is None:
        return float("inf")
    own = 0 if part.kind == "cuda" else part.devices_per_node * part.device.memory_bytes
    return max(0.0, USABLE_HOST_MEMORY * there - own)


def with_host_memory(cluster: AnyCluster, limit: int | None) -> AnyCluster:
    """A machine whose hosts, where they are not described, have memory enough for what offloading may take of each."""
    if not isinstance(cluster, Cluster):
        return replace(cluster, parts=tuple(_with_memory(part, limit) for part in cluster.parts))
    return _with_memory(cluster, limit)


def _with_memory(part: Cluster, limit: int | None) -> Cluster:
    if not limit or part.kind != "cuda" or part.host_memory_bytes is not None:
        return part
    return replace(part, host_memory_bytes=max(ceil(limit / USABLE_HOST_MEMORY), host_memory(part) or 0))
