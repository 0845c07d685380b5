"""How much memory the host of a node has: described, measured, or as the catalog knows it."""

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog import find_device
from lightning_mist.hardware.cluster import Cluster


def host_memory(cluster: Cluster) -> int | None:
    """Bytes of memory that the host of each node has.

    Where the cluster does not say it, this is the catalog's memory for each device times the devices of a node.
    """
    if cluster.host_memory_bytes is not None:
        return cluster.host_memory_bytes
    try:
        each = find_device(cluster.device.name).host_memory_bytes
    except ProfileError:  # The catalog does not have the device.
        return None
    return None if each is None else each * cluster.devices_per_node
