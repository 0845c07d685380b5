"""Machines that are better than the one at hand in one way each."""

from dataclasses import dataclass, replace

from lightning_mist.hardware import Cluster, HardwareProfile, catalog_profile
from lightning_mist.tuner.budget import tensor_share, usable_bytes
from lightning_mist.tuner.space import SearchSpace
from lightning_mist.units import format_bytes

MORE_BYTES = 2**30
"""More memory per device that is asked about."""

MORE_DEVICES = 4
"""A machine is looked at up to so many times as large for a number of devices that cuts the batch into equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A better machine.

    Attributes:
        change: How it is better.
        cluster: Its devices.
        profile: How fast they are.
        memory_limit: What a device may use in all; ``None`` for what it has.
        host_memory_limit: What a node may use of its host's memory; ``None`` for no limit.
        is_faster: Whether more differs than limits.
    """

    change: str
    cluster: Cluster
    profile: HardwareProfile
    memory_limit: int | None
    host_memory_limit: int | None
    is_faster: bool = True


def better_machines(
    machine: Machine, *, global_batch_size: int, search: SearchSpace
) -> tuple[tuple[Machine, ...], tuple[str, ...]]:
    """Machines to ask about, and why others are not.

    Args:
        machine: The machine at hand.
        global_batch_size: Rows of a batch, which every machine must deal out equally.
        search: The search space: what it does not offload needs no faster host.
    """
    cluster, profile = machine.cluster, machine.profile
    found, left_out = [_more_memory(machine)], []
    faster = replace(machine, is_faster=True)
    if machine.host_memory_limit is not None and search.offload:
        twice = 2 * machine.host_memory_limit
        found.append(
            replace(
                machine,
                change=f"twice the host memory ({format_bytes(twice)} per node)",
                host_memory_limit=twice,
            )
        )
    larger = _larger(cluster, global_batch_size)
    if larger is None:
        left_out.append(
            f"more devices: no number of them up to {MORE_DEVICES * cluster.world_size} deals {global_batch_size} rows "
            "out equally"
        )
    elif not profile.source.startswith("catalog"):
        left_out.append("more devices: how a larger machine communicates was not measured")
    else:
        change = f"{larger.world_size} devices in place of {cluster.world_size}"
        if larger.num_nodes > cluster.num_nodes:
            change += f", on {larger.num_nodes} nodes"
        found.append(replace(faster, change=change, cluster=larger, profile=_catalogued(larger, profile)))
    if cluster.devices_per_node > 1 and any(item.num_nodes == 1 for item in profile.collectives):
        change = "twice the bandwidth between the devices of a node"
        found.append(replace(faster, change=change, profile=_faster_links(profile, across=False)))
    if cluster.num_nodes > 1:
        found.append(
            replace(faster, change="twice the bandwidth between nodes", profile=_faster_links(profile, across=True))
        )
    if search.offload and profile.host_to_device_bytes_per_second > 0:
        change = "twice the bandwidth between devices and their host"
        found.append(replace(faster, change=change, profile=_faster_host(profile)))
    return tuple(found), tuple(left_out)


def _more_memory(machine: Machine) -> Machine:
    cluster = machine.cluster
    more = replace(cluster, device=replace(cluster.device, memory_bytes=cluster.device.memory_bytes + MORE_BYTES))
    if machine.memory_limit is None:
        limit = round(usable_bytes(more, None) / tensor_share(cluster))
    else:
        limit = machine.memory_limit + MORE_BYTES
    change = f"{format_bytes(MORE_BYTES)} more memory per device"
    return replace(machine, change=change, memory_limit=limit)


def _larger(cluster: Cluster, rows: int) -> Cluster | None:
    """The next larger cluster that deals a batch out equally: with larger nodes if there is one, else with more."""
    if cluster.num_nodes == 1:
        counts = range(cluster.devices_per_node + 1, MORE_DEVICES * cluster.devices_per_node + 1)
        return next((replace(cluster, devices_per_node=count) for count in counts if rows % count == 0), None)
    nodes = range(cluster.num_nodes + 1, MORE_DEVICES * cluster.num_nodes + 1)
    fitting = (count for count in nodes if rows % (count * cluster.devices_per_node) == 0)
    return next((replace(cluster, num_nodes=count) for count in fitting), None)


def _catalogued(cluster: Cluster, profile: HardwareProfile) -> HardwareProfile:
    """The catalog's figures for a cluster, with what runs have taught."""
    return replace(catalog_profile(cluster), corrections=profile.corrections, overheads=profile.overheads)


def _faster_links(profile: HardwareProfile, *, across: bool) -> HardwareProfile:
    """Collectives within or across nodes at twice their rates."""
    return replace(
        profile,
        collectives=tuple(
            replace(item, bytes_per_second=2 * item.bytes_per_second) if (item.num_nodes > 1) == across else item
            for item in profile.collectives
        ),
    )


def _faster_host(profile: HardwareProfile) -> HardwareProfile:
    return replace(
        profile,
        host_to_device_bytes_per_second=2 * profile.host_to_device_bytes_per_second,
        device_to_host_bytes_per_second=2 * profile.device_to_host_bytes_per_second,
        host_bytes_per_second_per_node=2 * profile.host_bytes_per_second_per_node,
    )
