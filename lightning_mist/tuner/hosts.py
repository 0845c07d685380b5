"""What of a search space's offload a machine has hosts for."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
from lightning_mist.plan import ModuleMap
from lightning_mist.tuner.space import OFFLOADED, Space


def with_offload(
    space: Space, cluster: AnyCluster, profiles: Sequence[HardwareProfile], module_map: ModuleMap
) -> Space:
    """A search space whose kinds of offloaded state are settled.

    Where they are left to the devices, all are looked at on devices with memory of their own. Nothing is where the
    rates of copies between such devices and their hosts are not known, nor what the module has to have on its device.

    Args:
        space: The search space.
        cluster: The devices.
        profiles: How fast those of each part are.
        module_map: The module, whose exclusions are honoured.
    """
    if space.search.offload is None:
        every = OFFLOADED if cluster.kind == "cuda" else ()
        space = replace(space, search=replace(space.search, offload=every))
    space = _without_ruled_out(space, module_map)
    if not space.search.offload or all(map(_knows_copies, profiles, cluster.parts)):
        return space
    note = "without offload: how fast devices copy from and to the host is not known"
    return replace(space, search=replace(space.search, offload=()), notes=(*space.notes, note))


def _without_ruled_out(space: Space, module_map: ModuleMap) -> Space:
    reasons: dict[str, list[str]] = {}
    for kind in space.search.offloaded:
        reasons.setdefault("; ".join(module_map.excludes_offload(kind)), []).append(kind)
    left = tuple(reasons.pop("", ()))
    notes = tuple(f"without offload of {', '.join(kinds)}: {why}" for why, kinds in reasons.items())
    return replace(space, search=replace(space.search, offload=left), notes=(*space.notes, *notes)) if notes else space


def _knows_copies(profile: HardwareProfile, part: Cluster) -> bool:
    """Whether the rates of copies between a device and its host are known."""
    rates = profile.host_to_device_bytes_per_second, profile.device_to_host_bytes_per_second
    return part.device.kind != "cuda" or min(rates) > 0
