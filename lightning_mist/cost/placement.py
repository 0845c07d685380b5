"""Where the devices of a plan's stages lie, as far as what they exchange depends on it.

Devices are numbered node by node. What crosses a boundary is worked out device by device: a device has an interval of
the rows of a microbatch and one of their sequence, of which context-parallel devices have parts, and sequence-parallel
ones parts of these. It receives what its own intervals share with those of the stage before. Tensor-parallel devices
that have the same each send to some of those that ask (:class:`lightning_mist.plan.mesh.Side`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from lightning_mist.plan import Plan, StageMesh

Interval: TypeAlias = tuple[Fraction, Fraction]
"""A half-open part of something whose length is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How one microbatch crosses a boundary between stages.

    Attributes:
        sent: The most that one device of the stage in front sends in a forward (and receives in a backward), as a part
            of what crosses in one replica of the pipeline.
        received: The most that one device of the stage behind receives (and sends).
        sent_messages: The most messages per tensor that one device in front sends.
        received_messages: The most messages per tensor that one device behind receives.
        across: Whether any of them goes to another node.
        sharing: Part of a node's devices that send to other nodes in a forward (and receive in a backward), over this
            boundary and others.
        receiving: Part of a node's devices that receive from other nodes (and send), over this boundary and others.
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
        shard_nodes: Nodes that the ranks with the same parameters span.
        ring_nodes: Nodes that the ranks span that share the sequence of a row.
        tied_nodes: Nodes that the ranks span that sum gradients of tied parameters.
        share: Part of what crosses in a replica that is a device's own at this stage.
        before: The boundary in front of the stage; ``None`` for the first stage.
        behind: The boundary behind it; ``None`` for the last one.
    """

    shard_nodes: int
    ring_nodes: int
    tied_nodes: int
    share: float
    before: Crossing | None
    behind: Crossing | None


def placements_of(plan: Plan, devices_per_node: int) -> tuple[Placement, ...]:
    """The placement of every stage of a plan.

    Args:
        plan: The plan.
        devices_per_node: Devices of each node.
    """
    bounds = range(plan.num_stages - 1)
    flows = [tuple(_flows(plan, stage, devices_per_node)) for stage in bounds]
    across = [flow for found in flows for flow in found if flow.across]
    sharing = _crowding({flow.sender for flow in across}, devices_per_node)
    receiving = _crowding({flow.receiver for flow in across}, devices_per_node)
    crossings = [_crossing(found, sharing, receiving) for found in flows]
    ends = [_column(plan.stages[stage].mesh, plan.num_replicas) for stage in (0, -1)]
    return tuple(
        Placement(
            shard_nodes=max(_nodes(group, devices_per_node) for group in _sharing_parameters(stage.mesh)),
            ring_nodes=max(_nodes(group, devices_per_node) for group in _sharing_rows(stage.mesh)),
            tied_nodes=min(2, _nodes([device for end in ends for device in end], devices_per_node)),
            share=_share(stage.mesh, plan.num_replicas),
            before=crossings[index - 1] if index else None,
            behind=crossings[index] if index < len(crossings) else None,
        )
        for index, stage in enumerate(plan.stages)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a device has of a microbatch of its replica."""

    tensor_index: int
    rows: Interval
    sequence: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """What one device sends to another of the next stage."""

    sender: int
    receiver: int
    part: Fraction
    across: bool


def _parts(mesh: StageMesh, replicas: int) -> list[_Part]:
    """What the devices of a replica have; it is the same in all replicas."""
    tensor, context = mesh.tensor_parallel_degree, mesh.context_parallel_degree
    per_replica = mesh.data_parallel_degree // replicas
    pieces = tensor if mesh.sequence_parallel else 1
    found = []
    for place in range(len(mesh.devices) // replicas):
        others, tensor_index = divmod(place, tensor)
        row, context_index = divmod(others, context)
        piece = context_index * pieces + tensor_index % pieces
        rows, sequence = _interval(row, per_replica), _interval(piece, context * pieces)
        found.append(_Part(tensor_index=tensor_index, rows=rows, sequence=sequence))
    return found


def _interval(index: int, count: int) -> Interval:
    return Fraction(index, count), Fraction(index + 1, count)


def _common(first: Interval, second: Interval) -> Fraction:
    return max(Fraction(0), min(first[1], second[1]) - max(first[0], second[0]))


def _pairs(before: StageMesh, after: StageMesh, replicas: int) -> Iterator[tuple[int, int, Fraction]]:
    """Places of senders and receivers in a replica, and what passes between them in one microbatch."""
    senders, tensor = _parts(before, replicas), before.tensor_parallel_degree
    for place, receiver in enumerate(_parts(after, replicas)):
        for other, sender in enumerate(senders):
            if not before.sequence_parallel and sender.tensor_index != receiver.tensor_index % tensor:
                continue
            shared = _common(sender.rows, receiver.rows) * _common(sender.sequence, receiver.sequence)
            if shared:
                yield other, place, shared


def _flows(plan: Plan, stage: int, devices_per_node: int) -> Iterator[_Flow]:
    """What passes from a stage to the next in one microbatch."""
    before, after, replicas = plan.stages[stage].mesh, plan.stages[stage + 1].mesh, plan.num_replicas
    pairs = list(_pairs(before, after, replicas))
    for replica in range(replicas):
        senders, receivers = (mesh.devices[replica * len(mesh.devices) // replicas :] for mesh in (before, after))
        for other, place, shared in pairs:
            sender, receiver = senders[other], receivers[place]
            across = sender // devices_per_node != receiver // devices_per_node
            yield _Flow(sender=sender, receiver=receiver, part=shared, across=across)


def _crowding(devices: Iterable[int], devices_per_node: int) -> float:
    """The most of one node's devices that are among some, as a part of a node's devices."""
    counts = Counter(device // devices_per_node for device in devices)
    return max(counts.values(), default=0) / devices_per_node


def _crossing(flows: Sequence[_Flow], sharing: float, receiving: float) -> Crossing:
    sent, received = ({}, {})  # type: tuple[dict[int, Fraction], dict[int, Fraction]]
    for flow in flows:
        sent[flow.sender] = sent.get(flow.sender, Fraction(0)) + flow.part
        received[flow.receiver] = received.get(flow.receiver, Fraction(0)) + flow.part
    return Crossing(
        sent=float(max(sent.values())),
        received=float(max(received.values())),
        sent_messages=max(Counter(flow.sender for flow in flows).values()),
        received_messages=max(Counter(flow.receiver for flow in flows).values()),
        across=any(flow.across for flow in flows),
        sharing=sharing,
        receiving=receiving,
    )


def _share(mesh: StageMesh, replicas: int) -> float:
    pieces = mesh.context_parallel_degree * (mesh.tensor_parallel_degree if mesh.sequence_parallel else 1)
    return replicas / (mesh.data_parallel_degree * pieces)


def _sharing_parameters(mesh: StageMesh) -> list[tuple[int, ...]]:
    """Devices with the same parameters, by tensor-parallel index."""
    return [mesh.devices[index :: mesh.tensor_parallel_degree] for index in range(mesh.tensor_parallel_degree)]


def _sharing_rows(mesh: StageMesh) -> list[tuple[int, ...]]:
    """Devices that share the sequence of the same rows."""
    width = len(mesh.devices) // mesh.data_parallel_degree
    return [
        mesh.devices[first + index : first + width : mesh.tensor_parallel_degree]
        for first in range(0, len(mesh.devices), width)
        for index in range(mesh.tensor_parallel_degree)
    ]


def _column(mesh: StageMesh, replicas: int) -> tuple[int, ...]:
    """The devices of a stage in the first replica of the pipeline."""
    return mesh.devices[: len(mesh.devices) // replicas]


def _nodes(devices: Sequence[int], devices_per_node: int) -> int:
    return len({device // devices_per_node for device in devices})
