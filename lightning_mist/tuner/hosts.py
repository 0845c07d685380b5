"""What of a search space's offload a machine has hosts for."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
from lightning_mist.tuner.space import OFFLOADED, Space


def with_offload(space: Space, cluster: AnyCluster, profiles: Sequence[HardwareProfile]) -> Space:
    """A search space whose kinds of offloaded state are settled.

    Where they are left to the devices, all are looked at on devices with memory of their own. Nothing is where the
    rates of copies between such devices and their hosts are not known.

    Args:
        space: The search space.
        cluster: The devices.
        profiles: How fast those of each part are.
    """
    if space.search.offload is None:
        every = OFFLOADED if cluster.kind == "cuda" else ()
        space = replace(space, search=replace(space.search, offload=every))
    if not space.search.offload or all(map(_knows_copies, profiles, cluster.parts)):
        return space
    note = "without offload: how fast devices copy from and to the host is not known"
    return replace(space, search=replace(space.search, offload=()), notes=(*space.notes, note))


def _knows_copies(profile: HardwareProfile, part: Cluster) -> bool:
    """Whether the rates of copies between a device and its host are known."""
    rates = profile.host_to_device_bytes_per_second, profile.device_to_host_bytes_per_second
    return part.device.kind != "cuda" or min(rates) > 0
