"""The machine as data: devices, links, how many of each.

A cluster has equal devices on equal nodes; a mixed one has several such parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import TypeAlias

from lightning_mist.errors import PlanError

MOST_DEVICES = 1_000_000
"""More than any machine has, and as many as lists of ranks can be made of in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU process.

    Attributes:
        memory_bytes: Memory of the device (for a CPU process, its share of the host's).
    """

    name: str
    memory_bytes: int
    kind: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection by its line rate, before any protocol.

    Attributes:
        latency_seconds: Time of an empty message, launch included.
    """

    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < float("inf") or not 0 <= self.latency_seconds < float("inf"):
            raise PlanError(
                f"a link of {self.bytes_per_second} bytes/s and {self.latency_seconds} s: the rate must be positive, "
                "the latency not negative, both finite"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """How fast devices copy from and to the pinned memory of their host.

    Attributes:
        to_device_bytes_per_second: What one device copies from the host while the others do not.
        node_bytes_per_second: What all devices of a node together copy in one direction; 0 for as much as they all can.
    """

    to_device_bytes_per_second: float
    to_host_bytes_per_second: float
    node_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        rates = self.to_device_bytes_per_second, self.to_host_bytes_per_second
        if not all(0 < rate < float("inf") for rate in rates) or not 0 <= self.node_bytes_per_second < float("inf"):
            raise PlanError(
                f"a host link of {rates[0]} bytes/s to the device, {rates[1]} to the host and "
                f"{self.node_bytes_per_second} per node: rates must be positive and finite; leave the node's out if it "
                "sets no limit"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``num_nodes`` equal nodes with ``devices_per_node`` equal devices.

    Attributes:
        intra_node: What one device can send to the others of its node, if described; the catalog's otherwise.
        inter_node: What one node can send to the others, all its devices together, if described; the catalog's
            otherwise.
        host: How fast devices copy from and to their host, if described; the catalog's otherwise.
        host_memory_bytes: Memory of each node's host, if described or measured; the catalog's otherwise, see
            :func:`~lightning_mist.hardware.catalog.devices`.
    """

    num_nodes: int
    devices_per_node: int
    device: Device
    intra_node: Link | None = None
    inter_node: Link | None = None
    host: HostLink | None = None
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise PlanError(f"a cluster of {self.num_nodes} nodes x {self.devices_per_node}: both must be at least 1")
        if self.world_size > MOST_DEVICES:
            shown = f"{min(self.world_size, 10**18):,}"  # what is longer is no number to read
            raise PlanError(
                f"a cluster of {shown} devices: nothing is planned for more than {MOST_DEVICES:,}; name fewer"
            )
        if self.host_memory_bytes is not None and self.host_memory_bytes < 1:
            raise PlanError(
                f"hosts with {self.host_memory_bytes} bytes of memory: a host has some; leave it out if it is not known"
            )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.num_nodes * self.devices_per_node

    @property
    def kind(self) -> str:
        """``"cuda"`` or ``"cpu"``."""
        return self.device.kind

    @property
    def parts(self) -> tuple["Cluster", ...]:
        """The cluster itself, which has one part; see :class:`~lightning_mist.hardware.MixedCluster`."""
        return (self,)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first rank of its only part."""
        return (0,)

    @property
    def text(self) -> str:
        """The cluster in one line, without memory and links: ``4x8xL4``."""
        return f"{self.num_nodes}x{self.devices_per_node}x{self.device.name}"

    def part_of(self, rank: int) -> int:
        """Index of the part that a rank belongs to: there is one."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCluster:
    """Several parts, for example a node of A100s and two of V100s, whose nodes are all connected.

    Attributes:
        parts: The parts. The ranks of each follow those of the part before it.
        link: What one node can send to nodes of other parts, all its devices together, if described. Otherwise as much
            as it can send to nodes of its own part, so that the slower of two parts sets the pace.
    """

    parts: tuple[Cluster, ...]
    link: Link | None = None

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise PlanError(
                f"a mixed cluster of {len(self.parts)} parts: it has at least 2; describe one kind of device as a "
                "Cluster"
            )
        kinds = [part.device.kind for part in self.parts]
        if len(set(kinds)) > 1:
            raise PlanError(
                f"cluster {self.text} has devices of kinds {', '.join(kinds)}: processes of one run exchange tensors "
                "of one kind of device; use CUDA devices only, or CPUs only"
            )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return sum(part.world_size for part in self.parts)

    @property
    def num_nodes(self) -> int:
        """Number of nodes over all parts."""
        return sum(part.num_nodes for part in self.parts)

    @property
    def devices_per_node(self) -> int:
        """A number of devices into groups of which every node can be divided, the greatest."""
        return gcd(*(part.devices_per_node for part in self.parts))

    @property
    def kind(self) -> str:
        """``"cuda"`` or ``"cpu"``."""
        return self.parts[0].device.kind

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first rank of every part."""
        return tuple(accumulate((part.world_size for part in self.parts[:-1]), initial=0))

    @property
    def text(self) -> str:
        """The cluster in one line, without memory and links: ``1x8xA100-40+2x8xV100-32``."""
        return "+".join(part.text for part in self.parts)

    def part_of(self, rank: int) -> int:
        """Index of the part that a rank belongs to."""
        return next(index for index in reversed(range(len(self.parts))) if rank >= self.offsets[index])


AnyCluster: TypeAlias = Cluster | MixedCluster
"""Devices of one kind, or of several."""


def cluster_of(parts: Sequence[Cluster], link: Link | None = None) -> AnyCluster:
    """The cluster with these parts, in the simplest form that says the same.

    Neighbouring parts that differ only in how many nodes they have are one part, unless nodes of different parts have a
    link of their own; and one part is a :class:`Cluster`.

    Raises:
        PlanError: If there is no part, or their devices are of different kinds.
    """
    merged: list[Cluster] = []
    for part in parts:
        if link is None and merged and replace(merged[-1], num_nodes=part.num_nodes) == part:
            merged[-1] = replace(part, num_nodes=merged[-1].num_nodes + part.num_nodes)
        else:
            merged.append(part)
    return merged[0] if len(merged) == 1 else MixedCluster(parts=tuple(merged), link=link)


def single(cluster: AnyCluster, what: str) -> Cluster:
    """The cluster, if its devices are all of one kind.

    Args:
        what: What needs one kind of device, for the message.
    """
    if isinstance(cluster, MixedCluster):
        raise PlanError(f"cluster {cluster.text}: {what} needs devices of one kind; name one of its parts")
    return cluster
