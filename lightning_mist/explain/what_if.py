"""Machines that are better than the one at hand in one way each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite

from lightning_mist.hardware import (
    AnyCluster,
    Cluster,
    HardwareProfile,
    MixedCluster,
    catalog_profile,
    host_memory,
    usable_host_bytes,
)
from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.tuner.space import host_bytes_of_each, least_of_stages, tensor_share, usable_bytes, usable_of_parts
from lightning_mist.units import format_bytes

MORE_BYTES = 2**30
"""More memory per device that is asked about."""

MORE_DEVICES = 4
"""A machine is looked at up to so many times as large for a number of devices that cuts the batch into equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A better machine.

    Attributes:
        host_memory_limit: What a node may use of its host's memory; ``None`` for the share that
            plans use of what it has, see :func:`~lightning_mist.hardware.host_share.usable_host_bytes`.
        is_other: Whether more differs than limits, so that another planner has to be asked.
    """

    change: str
    cluster: AnyCluster
    profiles: tuple[HardwareProfile, ...]
    memory_limit: int | None
    host_memory_limit: int | None
    is_other: bool = True

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that tensors may take on each device of every stage of a plan."""
        return least_of_stages(plan, self.cluster, usable_of_parts(self.cluster, self.memory_limit))

    def host_limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes of host memory that each device of every stage may use."""
        each = [host_bytes_of_each(part, self.host_memory_limit) for part in self.cluster.parts]
        return least_of_stages(plan, self.cluster, each)


def better_machines(
    machine: Machine, *, global_batch_size: int, search: SearchSpace
) -> tuple[tuple[Machine, ...], tuple[str, ...]]:
    """Machines to ask about, and why others are not: what is not offloaded needs no faster host, for one."""
    cluster, other = machine.cluster, replace(machine, is_other=True)
    collectives = [item for profile in machine.profiles for item in profile.collectives]
    found, left_out = [_more_memory(machine)], []
    if search.offload:
        found.extend(_more_host_memory(machine))
    larger = _larger(cluster, global_batch_size, search.data_parallel_size)
    if larger is None:
        left_out.append(
            f"more devices: no number of them up to {MORE_DEVICES * cluster.world_size} deals {global_batch_size} rows "
            "out equally"
        )
    elif not all(profile.source.startswith("catalog") for profile in machine.profiles):
        left_out.append("more devices: how a larger machine communicates was not measured")
    else:
        profiles = tuple(map(_catalogued, larger.parts, machine.profiles))
        found.append(replace(other, change=_growth(cluster, larger), cluster=larger, profiles=profiles))
    if any(item.num_nodes == 1 and item.group_size > 1 for item in collectives):
        change = "twice the bandwidth between the devices of a node"
        found.append(_faster(other, change, lambda profile: _faster_links(profile, across=False)))
    if cluster.num_nodes > 1:
        change = "twice the bandwidth between nodes"
        faster = _faster(other, change, lambda profile: _faster_links(profile, across=True))
        found.append(replace(faster, cluster=_faster_seam(cluster)))
    if search.offload and any(profile.host_to_device_bytes_per_second > 0 for profile in machine.profiles):
        found.append(_faster(other, "twice the bandwidth between devices and their host", _faster_host))
    return tuple(found), tuple(left_out)


def _more_memory(machine: Machine) -> Machine:
    cluster, limit = machine.cluster, machine.memory_limit
    change = f"{format_bytes(MORE_BYTES)} more memory per device"
    if isinstance(cluster, MixedCluster):
        larger = replace(cluster, parts=tuple(map(_with_more, cluster.parts)))
        raised = None if limit is None else limit + MORE_BYTES
        return replace(machine, change=change, cluster=larger, memory_limit=raised, is_other=True)
    if limit is None:
        limit = round(usable_bytes(_with_more(cluster), None) / tensor_share(cluster)) - MORE_BYTES
    return replace(machine, change=change, memory_limit=limit + MORE_BYTES)


def _more_host_memory(machine: Machine) -> Iterator[Machine]:
    """The machine with twice the host memory, if that is limited."""
    cluster, limit = machine.cluster, machine.host_memory_limit
    if isinstance(cluster, MixedCluster) and limit is None:
        larger = replace(cluster, parts=tuple(map(_with_twice_the_host, cluster.parts)))
        if larger != cluster:
            yield replace(machine, change="twice the host memory", cluster=larger, is_other=True)
        return
    node = usable_host_bytes(cluster.parts[0]) if limit is None else limit
    if isfinite(node):
        twice = 2 * round(node)
        change = f"twice the host memory ({format_bytes(twice)} per node)"
        yield replace(machine, change=change, host_memory_limit=twice)


def _with_twice_the_host(part: Cluster) -> Cluster:
    there = host_memory(part)
    return part if there is None else replace(part, host_memory_bytes=2 * there)


def _with_more(part: Cluster) -> Cluster:
    return replace(part, device=replace(part.device, memory_bytes=part.device.memory_bytes + MORE_BYTES))


def _larger(cluster: AnyCluster, rows: int, loaders: int | None) -> AnyCluster | None:
    """The next larger cluster that deals a batch out equally: a single node with more devices, else more nodes.

    Of unlike nodes the kind is taken of which the fewest more are needed.

    Args:
        loaders: How many batches are loaded at once, if that was given; else every device of the larger cluster loads
            one, if every one of this does.
    """
    is_even = rows % cluster.world_size == 0

    def deals(count: int) -> bool:
        return count % loaders == 0 if loaders else not is_even or rows % count == 0

    if isinstance(cluster, Cluster) and cluster.num_nodes == 1:
        counts = range(cluster.devices_per_node + 1, MORE_DEVICES * cluster.devices_per_node + 1)
        return next((replace(cluster, devices_per_node=count) for count in counts if deals(count)), None)
    for more in range(1, (MORE_DEVICES - 1) * cluster.num_nodes + 1):
        for index, part in enumerate(cluster.parts):
            count = cluster.world_size + more * part.devices_per_node
            if count <= MORE_DEVICES * cluster.world_size and deals(count):
                grown = replace(part, num_nodes=part.num_nodes + more)
                if isinstance(cluster, Cluster):
                    return grown
                return replace(cluster, parts=(*cluster.parts[:index], grown, *cluster.parts[index + 1 :]))
    return None


def _growth(cluster: AnyCluster, larger: AnyCluster) -> str:
    text = f"{larger.world_size} devices in place of {cluster.world_size}"
    if isinstance(cluster, MixedCluster):
        return f"{text} ({larger.text})"
    return f"{text}, on {larger.num_nodes} nodes" if larger.num_nodes > cluster.num_nodes else text


def _catalogued(cluster: Cluster, profile: HardwareProfile) -> HardwareProfile:
    """The catalog's figures for a cluster, with what runs have taught."""
    return replace(catalog_profile(cluster), corrections=profile.corrections, overheads=profile.overheads)


def _faster(machine: Machine, change: str, improve: Callable[[HardwareProfile], HardwareProfile]) -> Machine:
    return replace(machine, change=change, profiles=tuple(map(improve, machine.profiles)))


def _faster_links(profile: HardwareProfile, *, across: bool) -> HardwareProfile:
    """Collectives within or across nodes at twice their rates."""
    return replace(
        profile,
        collectives=tuple(
            replace(item, bytes_per_second=2 * item.bytes_per_second) if (item.num_nodes > 1) == across else item
            for item in profile.collectives
        ),
    )


def _faster_seam(cluster: AnyCluster) -> AnyCluster:
    """The cluster with twice the bandwidth between nodes of unlike parts, if that is described."""
    if isinstance(cluster, Cluster) or cluster.link is None:
        return cluster
    return replace(cluster, link=replace(cluster.link, bytes_per_second=2 * cluster.link.bytes_per_second))


def _faster_host(profile: HardwareProfile) -> HardwareProfile:
    rates = ("host_to_device_bytes_per_second", "device_to_host_bytes_per_second", "host_bytes_per_second_per_node")
    return replace(profile, **{name: 2 * getattr(profile, name) for name in rates})
