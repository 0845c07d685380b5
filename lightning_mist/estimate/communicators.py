"""The NCCL communicators that a rank of a running plan holds.

Each group has one from the start: Lightning binds the default group to the device, and then groups connect when they
are made (``torch.distributed.init_process_group``, ``device_id``). Messages between stages have one for each direction
of each pair of ranks. Groups for objects and host tensors use gloo and hold nothing.
"""

from dataclasses import dataclass
from typing import Literal

from lightning_mist.plan import ModuleMap, Plan, replica_ranks
from lightning_mist.plan.mesh import make_mesh, message_pairs, process_groups

Purpose = Literal[
    "Lightning",
    "world",
    "batches",
    "data parallel",
    "context parallel",
    "tensor parallel",
    "tied parameters",
    "messages",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One NCCL communicator.

    Attributes:
        purpose: What it is for. ``"Lightning"`` is the default group, for barriers and broadcasts of initial values.
    """

    purpose: Purpose
    ranks: tuple[int, ...]


def communicators_of(plan: Plan, module_map: ModuleMap, rank: int) -> tuple[Communicator, ...]:
    """Every communicator that a rank holds.

    Returns:
        The communicators; groups of one rank have none. Equal groups of different purpose share one, but for the
        default group and the pairs that send each other messages.
    """
    mesh = make_mesh(plan, rank, module_map)
    purposes: dict[tuple[int, ...], Purpose] = {tuple(range(plan.world_size)): "world"}
    purposes.setdefault(replica_ranks(plan, mesh.replica), "batches")
    purposes.setdefault(tuple(sorted(mesh.peers)), "data parallel")
    purposes.setdefault(tuple(sorted(mesh.tensor_peers)), "tensor parallel")
    mine = [group for group in process_groups(plan, module_map) if rank in group]
    found = [Communicator(purpose="Lightning", ranks=tuple(range(plan.world_size)))]
    found += [Communicator(purpose=purposes.get(ranks, "tied parameters"), ranks=ranks) for ranks in mine]
    found += [
        Communicator(purpose="messages", ranks=(min(pair), max(pair))) for pair in message_pairs(plan) if rank in pair
    ]
    return tuple(communicator for communicator in found if len(communicator.ranks) > 1)


def communicators_by_degrees(plan: Plan, rank: int) -> tuple[Communicator, ...]:
    """As :func:`communicators_of` for plans that the runtime does not execute: those that their degrees need."""
    group = plan.stage_of(rank)
    mesh = plan.stages[group].mesh
    place, tensor = mesh.devices.index(rank), mesh.tensor_parallel_degree
    shared = tensor * mesh.context_parallel_degree
    first = place // tensor * tensor
    groups: tuple[tuple[Purpose, tuple[int, ...]], ...] = (
        ("Lightning", tuple(range(plan.world_size))),
        ("world", tuple(range(plan.world_size))),
        ("data parallel", mesh.devices[place % tensor :: tensor] if mesh.context_parallel_degree > 1 else ()),
        ("data parallel", mesh.devices[place % shared :: shared]),
        ("context parallel", mesh.devices[place // shared * shared + place % tensor :: tensor][: shared // tensor]),
        ("tensor parallel", mesh.devices[first : first + tensor]),
    )
    found = [Communicator(purpose=purpose, ranks=tuple(sorted(ranks))) for purpose, ranks in groups if len(ranks) > 1]
    for other in (group - 1, group + 1):
        if 0 <= other < plan.num_groups:
            there = plan.stages[other].devices[min(place, len(plan.stages[other].devices) - 1)]
            # One for either direction of rank numbers.
            found += [Communicator(purpose="messages", ranks=(min(rank, there), max(rank, there)))] * 2
    return tuple(found)
