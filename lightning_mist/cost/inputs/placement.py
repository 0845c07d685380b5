"""Where the devices of a plan's stages lie, as far as what they exchange depends on it.

Devices are numbered node by node, in a cluster of unlike devices part by part. A stage lies within one part, unless it
is the only one. What crosses a boundary is worked out device by device: a device has an interval of
the rows of a microbatch and one of their sequence, of which context-parallel devices have parts, and sequence-parallel
ones parts of these. It receives what its own intervals share with those of the stage before. Tensor-parallel devices
that have the same each send to some of those that ask (:class:`lightning_mist.plan.mesh.Side`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

from lightning_mist.errors import PlanError
from lightning_mist.hardware import AnyCluster
from lightning_mist.plan import Plan, StageMesh

Piece: TypeAlias = tuple[int, int]
"""Which of how many equal parts of something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Which devices are in one node.

    Attributes:
        parts: Number of devices of every part and of each of its nodes; the last part takes all that are left.
    """

    parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cluster: "AnyCluster | Nodes | int") -> "Nodes":
        """The nodes of a cluster, or nodes of one size, of which the devices of each are given."""
        if isinstance(cluster, Nodes):
            return cluster
        if isinstance(cluster, int):
            return cls(parts=((cluster, cluster),))
        return cls(parts=tuple((part.world_size, part.devices_per_node) for part in cluster.parts))

    def place(self, device: int) -> tuple[int, int]:
        """The part and the node of a device; nodes of different parts have different pairs of these."""
        for part, (count, per_node) in enumerate(self.parts[:-1]):
            if device < count:
                return part, device // per_node
            device -= count
        return len(self.parts) - 1, device // self.parts[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCrossing:
    """How one microbatch crosses a boundary between stages.

    Attributes:
        sent: The most that one device of the stage in front sends in a forward (and receives in a backward), as a part
            of what crosses in one replica of the pipeline.
        received: The most that one device of the stage behind receives (and sends).
        sent_messages: The most messages per tensor that one device in front sends.
        sharing: Part of a node's devices that send to other nodes in a forward (and receive in a backward), over this
            boundary and others.
    """

    sent: float
    received: float
    sent_messages: int
    received_messages: int
    across: bool
    sharing: float
    receiving: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the devices of a stage and those it exchanges with lie.

    Attributes:
        shard_nodes: Nodes that the ranks span that ZeRO shards over, those with the same parameters but under hybrid
            sharding.
        replicate_nodes: Nodes that the ranks span that own the same, one of each shard group.
        ring_nodes: Nodes that the ranks span that share the sequence of a row.
        tied_nodes: Nodes that the ranks span that sum gradients of tied parameters.
        share: Part of what crosses in a replica that is a device's own at this stage.
        before: The boundary in front of the stage; ``None`` for the first stage.
        behind: The boundary behind it; ``None`` for the last one.
    """

    shard_nodes: int
    replicate_nodes: int
    ring_nodes: int
    tied_nodes: int
    share: float
    before: StageCrossing | None
    behind: StageCrossing | None


def parts_of(plan: Plan, cluster: AnyCluster | Nodes | int) -> tuple[int, ...]:
    """The part of the cluster in which each stage of a plan lies; nothing if the only stage lies in several.

    Raises:
        PlanError: If one of several stages lies in several parts.
    """
    nodes = Nodes.of(cluster)
    if len(nodes.parts) == 1:
        return (0,) * plan.num_stages
    found = [sorted({nodes.place(device)[0] for device in stage.devices}) for stage in plan.stages]
    if plan.num_stages == 1 and len(found[0]) > 1:
        return ()
    for index, parts in enumerate(found):
        if len(parts) > 1:
            raise PlanError(
                f"stages[{index}] has devices in parts {parts} of the cluster: the devices of a stage of a pipeline "
                "are alike; deal the devices of each part out to stages of their own"
            )
    return tuple(parts[0] for parts in found)


def placements_of(plan: Plan, cluster: AnyCluster | Nodes | int) -> tuple[Placement, ...]:
    """The placement of every stage of a plan.

    Raises:
        PlanError: If one of several stages lies in several parts of the cluster.
    """
    nodes = Nodes.of(cluster)
    return _placements(tuple(stage.mesh for stage in plan.stages), plan.num_replicas, parts_of(plan, nodes), nodes)


@lru_cache(maxsize=256)
def _placements(
    meshes: tuple[StageMesh, ...], replicas: int, parts: tuple[int, ...], nodes: Nodes
) -> tuple[Placement, ...]:
    """The placement of every stage, which depends on nothing else of a plan."""
    # Chunks of one group of devices have the same mesh.
    distinct = list(dict.fromkeys(meshes))
    places = {device: nodes.place(device) for mesh in distinct for device in mesh.devices}
    bounds = range(len(meshes) - 1)
    sides = list(pairwise(meshes))
    crossed = {pair: tuple(_across(*pair, replicas, places)) for pair in dict.fromkeys(sides)}
    across = [crossed[pair] for pair in sides]
    every = [pair for found in crossed.values() for pair in found]
    sharing = _crowding({sender for sender, _ in every}, places, nodes)
    receiving = _crowding({receiver for _, receiver in every}, places, nodes)
    crossings = [
        StageCrossing(
            **_shares(_Degrees.of(meshes[stage], replicas), _Degrees.of(meshes[stage + 1], replicas)),
            across=bool(across[stage]),
            sharing=sharing[parts[stage]],
            receiving=receiving[parts[stage + 1]],
        )
        for stage in bounds
    ]
    # The devices of the first and of the last stage in the first replica of the pipeline.
    ends = [device for mesh in (meshes[0], meshes[-1]) for device in mesh.devices[: len(mesh.devices) // replicas]]
    tied_nodes = min(2, _count(ends, places))
    groupings = _shard_groups, _replicates, _sharing_rows
    spans = {
        mesh: [max(_count(group, places) for group in grouped(mesh)) for grouped in groupings] for mesh in distinct
    }
    return tuple(
        Placement(
            shard_nodes=spans[mesh][0],
            replicate_nodes=spans[mesh][1],
            ring_nodes=spans[mesh][2],
            tied_nodes=tied_nodes,
            share=_share(mesh, replicas),
            before=crossings[index - 1] if index else None,
            behind=crossings[index] if index < len(crossings) else None,
        )
        for index, mesh in enumerate(meshes)
    )


@dataclass(frozen=True, slots=True)
class _Degrees:
    """How the devices of a replica share what it computes."""

    data: int
    tensor: int
    context: int
    sequence: bool

    @classmethod
    def of(cls, mesh: StageMesh, replicas: int) -> "_Degrees":
        tensor, context = mesh.tensor_parallel_degree, mesh.context_parallel_degree
        return cls(mesh.data_parallel_degree // replicas, tensor, context, mesh.sequence_parallel)


def _parts(degrees: _Degrees) -> list[tuple[int, Piece, Piece]]:
    """What the devices of a replica have of a microbatch: tensor-parallel index, rows and sequence."""
    tensor, context, per_replica = degrees.tensor, degrees.context, degrees.data
    pieces = tensor if degrees.sequence else 1
    found = []
    for place in range(per_replica * tensor * context):
        others, tensor_index = divmod(place, tensor)
        row, context_index = divmod(others, context)
        piece = context_index * pieces + tensor_index % pieces
        found.append((tensor_index, (row, per_replica), (piece, context * pieces)))
    return found


def _pieces(degrees: _Degrees) -> int:
    """In how many parts rows and sequences together come."""
    return degrees.data * degrees.context * (degrees.tensor if degrees.sequence else 1)


def _common(first: Piece, second: Piece) -> int:
    """How much of the whole two pieces have in common, in parts of one by the product of their numbers."""
    (one, count), (other, others) = first, second
    return max(0, min((one + 1) * others, (other + 1) * count) - max(one * others, other * count))


@lru_cache(maxsize=256)
def _pairs(before: _Degrees, after: _Degrees) -> tuple[tuple[int, int, Fraction], ...]:
    """Places of senders and receivers in a replica, and what passes between them in one microbatch."""
    senders, found = _parts(before), []
    whole = _pieces(before) * _pieces(after)
    for place, (index, rows, sequence) in enumerate(_parts(after)):
        for other, (own_index, own_rows, own_sequence) in enumerate(senders):
            if not before.sequence and own_index != index % before.tensor:
                continue
            shared = _common(own_rows, rows) * _common(own_sequence, sequence)
            if shared:
                found.append((other, place, Fraction(shared, whole)))
    return tuple(found)


@lru_cache(maxsize=256)
def _shares(before: _Degrees, after: _Degrees) -> Mapping[str, Any]:
    """The most that one device moves, by its names in :class:`StageCrossing`; it is the same in all replicas."""
    sent, received = ({}, {})  # type: tuple[dict[int, Fraction], dict[int, Fraction]]
    pairs = _pairs(before, after)
    for sender, receiver, part in pairs:
        sent[sender] = sent.get(sender, Fraction(0)) + part
        received[receiver] = received.get(receiver, Fraction(0)) + part
    return {
        "sent": float(max(sent.values())),
        "received": float(max(received.values())),
        "sent_messages": max(Counter(sender for sender, _, _ in pairs).values()),
        "received_messages": max(Counter(receiver for _, receiver, _ in pairs).values()),
    }


def _across(
    before: StageMesh, after: StageMesh, replicas: int, places: Mapping[int, tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Pairs of devices of a stage and of the next that are in different nodes, and of which one sends to the other."""
    pairs = _pairs(_Degrees.of(before, replicas), _Degrees.of(after, replicas))
    for replica in range(replicas):
        first, first_behind = (replica * len(mesh.devices) // replicas for mesh in (before, after))
        for other, place, _ in pairs:
            sender, receiver = before.devices[first + other], after.devices[first_behind + place]
            if places[sender] != places[receiver]:
                yield sender, receiver


def _crowding(devices: Iterable[int], places: Mapping[int, tuple[int, int]], nodes: Nodes) -> tuple[float, ...]:
    """For every part, the most of one node's devices that are among some, as a part of a node's devices."""
    counts = Counter(places[device] for device in devices)
    return tuple(
        max((count for (own, _), count in counts.items() if own == part), default=0) / per_node
        for part, (_, per_node) in enumerate(nodes.parts)
    )


def _share(mesh: StageMesh, replicas: int) -> float:
    pieces = mesh.context_parallel_degree * (mesh.tensor_parallel_degree if mesh.sequence_parallel else 1)
    return replicas / (mesh.data_parallel_degree * pieces)


def _sharing_parameters(mesh: StageMesh) -> list[tuple[int, ...]]:
    """Devices with the same parameters, by tensor-parallel index."""
    return [mesh.devices[index :: mesh.tensor_parallel_degree] for index in range(mesh.tensor_parallel_degree)]


def _shard_groups(mesh: StageMesh) -> list[tuple[int, ...]]:
    """Devices that ZeRO shards over."""
    count = mesh.shard_ranks
    return [
        peers[first : first + count] for peers in _sharing_parameters(mesh) for first in range(0, mesh.num_peers, count)
    ]


def _replicates(mesh: StageMesh) -> list[tuple[int, ...]]:
    """Devices with the same place in their shard groups."""
    count = mesh.shard_ranks
    return [peers[place::count] for peers in _sharing_parameters(mesh) for place in range(count)]


def _sharing_rows(mesh: StageMesh) -> list[tuple[int, ...]]:
    """Devices that share the sequence of the same rows."""
    width = len(mesh.devices) // mesh.data_parallel_degree
    return [
        mesh.devices[first + index : first + width : mesh.tensor_parallel_degree]
        for first in range(0, len(mesh.devices), width)
        for index in range(mesh.tensor_parallel_degree)
    ]


def _count(devices: Sequence[int], places: Mapping[int, tuple[int, int]]) -> int:
    """Nodes in which some devices lie."""
    return len({places[device] for device in devices})
