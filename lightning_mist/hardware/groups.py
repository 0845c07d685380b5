"""Groups of ranks to measure: which there are in a cluster, and their handles."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_mist.hardware.cluster import Cluster

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that communicate with each other.

    Attributes:
        handle: The group's ``torch.distributed`` handle; on ranks outside the group, whatever ``new_group`` returned.
    """

    ranks: tuple[int, ...]
    num_nodes: int
    handle: "dist.ProcessGroup"


def _sizes(limit: int) -> tuple[int, ...]:
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return tuple(sorted({*powers, limit}))


def group_shapes(cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """The ``(num_nodes, devices per node)`` of the groups worth measuring: powers of two, whole nodes, everything."""
    return tuple(
        (nodes, per_node)
        for nodes in _sizes(cluster.num_nodes)
        for per_node in _sizes(cluster.devices_per_node)
        if nodes * per_node > 1
    )


def group_ranks(cluster: Cluster, num_nodes: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Disjoint groups of one shape, as many as the cluster holds, so that they compete for links as in training.

    Ranks are laid out node by node. What does not fill a group is left out.
    """
    groups = []
    for first_node in range(0, cluster.num_nodes - num_nodes + 1, num_nodes):
        for first_device in range(0, cluster.devices_per_node - per_node + 1, per_node):
            groups.append(
                tuple(
                    node * cluster.devices_per_node + device
                    for node in range(first_node, first_node + num_nodes)
                    for device in range(first_device, first_device + per_node)
                )
            )
    return tuple(groups)


@contextmanager
def measuring_groups(cluster: Cluster) -> Iterator[tuple[RankGroup, ...]]:
    """Create the groups of :func:`group_shapes` on the running process group, and destroy them afterwards.

    Every rank must enter this at the same point. With one rank there are none.

    Yields:
        The groups, the same list on every rank, the one of all ranks last.
    """
    if cluster.world_size == 1:
        yield ()
        return
    import torch.distributed as dist

    if dist.get_world_size() != cluster.world_size:
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks for a cluster of {cluster.world_size} devices: "
            "they must be as many"
        )
    created = []
    try:
        for num_nodes, per_node in group_shapes(cluster):
            for ranks in group_ranks(cluster, num_nodes, per_node):
                created.append(RankGroup(ranks=ranks, num_nodes=num_nodes, handle=dist.new_group(list(ranks))))
        yield tuple(created)
    finally:
        for group in created:
            if dist.get_rank() in group.ranks:
                dist.destroy_process_group(group.handle)
