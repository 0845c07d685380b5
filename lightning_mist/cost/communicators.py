"""The NCCL communicators that a rank of a running plan holds.

A communicator is made when a group of ranks first exchanges device tensors, and keeps its buffers from then on.
Point-to-point messages that are not batched get one for each pair of ranks (github.com/pytorch/pytorch issue 129140),
and ours travel on two groups, one for either direction of rank numbers. Groups for objects use gloo and hold nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from lightning_mist.plan import ModuleMap, Plan, replica_of, replica_ranks
from lightning_mist.plan.mesh import (
    Side,
    make_mesh,
    tensor_ranks,
    tied_groups,
)

Purpose = Literal[
    "Lightning", "world", "data parallel", "context parallel", "tensor parallel", "tied parameters", "messages"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One NCCL communicator.

    Attributes:
        purpose: What it is for. ``"Lightning"`` is the default group, for barriers and broadcasts of initial values.
        ranks: Its global ranks, ascending.
    """

    purpose: Purpose
    ranks: tuple[int, ...]


def communicators_of(plan: Plan, module_map: ModuleMap, rank: int) -> tuple[Communicator, ...]:
    """Every communicator that a rank holds once a step has run.

    Args:
        plan: The plan.
        module_map: Which stage holds which parameter.
        rank: The global rank.

    Returns:
        The communicators; groups of one rank have none. Equal groups of different purpose share one, but for the
        default group and the pairs that exchange messages.
    """
    mesh = make_mesh(plan, rank, module_map)
    world = tuple(range(plan.world_size))
    groups: dict[tuple[int, ...], Purpose] = {world: "world"}
    groups.setdefault(tuple(sorted(mesh.peers)), "data parallel")
    groups.setdefault(tuple(sorted(mesh.tensor_peers)), "tensor parallel")
    for parameter in mesh.parameters:
        if parameter.requires_grad and len(parameter.stages) > 1:
            for group in tied_groups(plan, parameter):
                if rank in group:
                    groups.setdefault(group, "tied parameters")
    found = [Communicator(purpose="Lightning", ranks=world)]
    found += [Communicator(purpose=purpose, ranks=ranks) for ranks, purpose in groups.items()]
    found += [Communicator(purpose="messages", ranks=(min(pair), max(pair))) for pair in sorted(_messages(plan, rank))]
    return tuple(communicator for communicator in found if len(communicator.ranks) > 1)


def communicators_by_degrees(plan: Plan, rank: int) -> tuple[Communicator, ...]:
    """As :func:`communicators_of` for plans that the runtime does not execute: those that their degrees need.

    Args:
        plan: The plan.
        rank: The global rank.
    """
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


def _messages(plan: Plan, rank: int) -> set[tuple[int, int]]:
    """From whom to whom messages go that ``rank`` sends or receives."""
    return {*_batches(plan, rank), *_boundaries(plan, rank)}


def _batches(plan: Plan, rank: int) -> Iterator[tuple[int, int]]:
    """Batches go from the rank that loaded them to those that compute on them."""
    replica = replica_ranks(plan, replica_of(plan, rank))
    for reader in replica:
        for owner in _owners(plan, reader, replica):
            if owner != reader and rank in (owner, reader):
                yield owner, reader


def _owners(plan: Plan, reader: int, replica: tuple[int, ...]) -> set[int]:
    """Whose batches a rank computes on: those of ``row_slice``, also where a part would mix several."""
    stage = plan.stages[plan.stage_of(reader)]
    per_replica = stage.data_parallel_degree // plan.num_replicas
    place = stage.devices.index(reader) // (len(stage.devices) // stage.data_parallel_degree) % per_replica
    chunks, count = plan.num_microbatches * per_replica, len(replica)
    owners: set[int] = set()
    for chunk in range(place, chunks, per_replica):
        owners.update(replica[chunk * count // chunks : -(-(chunk + 1) * count // chunks)])
    return owners


def _boundaries(plan: Plan, rank: int) -> Iterator[tuple[int, int]]:
    """Activations go to the next stage, gradients back."""
    for stage in range(plan.num_stages - 1):
        for before, after in _neighbours(plan, stage, stage + 1):
            if before != after and rank in (before, after):
                yield before, after
                yield after, before


def _neighbours(plan: Plan, stage: int, following: int) -> Iterator[tuple[int, int]]:
    """Pairs of ranks of two stages that compute on the same rows and hold the same part of what crosses."""
    first, second = plan.stages[stage], plan.stages[following]
    mine, theirs = first.data_parallel_degree, second.data_parallel_degree
    for here, there in product(range(mine), range(theirs)):
        # Data-parallel index j of d has the rows from j / d to (j + 1) / d of every microbatch.
        if here * theirs >= (there + 1) * mine or there * mine >= (here + 1) * theirs:
            continue
        before, after = tensor_ranks(plan, stage, here), tensor_ranks(plan, following, there)
        sides = (
            Side(degree=len(before), is_shared=first.mesh.sequence_parallel),
            Side(degree=len(after), is_shared=second.mesh.sequence_parallel),
        )
        yield from {(before[source], after[index]) for source, index in _portions(*sides)}


def _portions(mine: Side, theirs: Side) -> Iterator[tuple[int, int]]:
    """Tensor-parallel indices that exchange something, in either direction."""
    length = mine.degree * theirs.degree  # divisible, as sequences that are shared out are
    for index in range(theirs.degree):
        for source, _, _ in theirs.sources(index, mine, length):
            yield source, index
    for index in range(mine.degree):
        for source, _, _ in mine.sources(index, theirs, length):
            yield index, source
