"""Clusters of unlike devices: parts, each of them equal devices on equal nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import TypeAlias

from lightning_mist.errors import PlanError
from lightning_mist.hardware.cluster import Cluster, Link


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
        """Check that there are parts, and that they could train together."""
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

    Raises:
        PlanError: If it is mixed.
    """
    if isinstance(cluster, MixedCluster):
        raise PlanError(f"cluster {cluster.text}: {what} needs devices of one kind; name one of its parts")
    return cluster
