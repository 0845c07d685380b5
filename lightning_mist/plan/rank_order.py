"""Which ranks belong to which stage."""

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from math import gcd
from typing import NamedTuple

from lightning_mist.errors import PlanError


class _Unit(NamedTuple):
    """Tensor-parallel ranks that go together: those of one data-parallel index of one stage."""

    stage: int
    data_index: int
    size: int


def rank_layout(degrees: Sequence[tuple[int, int]], devices_per_node: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Global ranks of every stage, data-parallel index slowest, tensor-parallel index fastest.

    The ranks of a stage are contiguous, so that those with the same parameters are near each other. The last stage
    comes first, so that global rank 0, where Lightning prints, logs and writes checkpoints, is one that sees losses. If
    tensor-parallel ranks would so lie in several nodes, stages are dealt to nodes by falling tensor-parallel degree
    instead; rank 0 stays one of the last stage.

    Args:
        devices_per_node: Ranks of each node; by default there is one node.

    Raises:
        PlanError: If the tensor-parallel ranks of some stage can neither be within one node nor fill several.
    """
    return _numbered(degrees, _by_stage(degrees), devices_per_node)


def rank_layouts(
    degrees: Sequence[tuple[int, int]], devices_per_node: int | None = None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Layouts of ranks of which one or another may be faster, that of :func:`rank_layout` first.

    In the others a replica of the pipeline is contiguous, so that what passes between its stages stays near, or stages
    are dealt to nodes by falling numbers of ranks, where one would lie in more nodes than it has to.
    """
    found = [rank_layout(degrees, devices_per_node)]
    if devices_per_node is not None and sum(data * tensor for data, tensor in degrees) > devices_per_node:
        # Degrees that do not divide each other may go into nodes in one order and not in another.
        with suppress(PlanError):
            found.append(_numbered(degrees, _by_replica(degrees), devices_per_node))
        whole = [_Unit(stage, 0, data * tensor) for stage, (data, tensor) in reversed(list(enumerate(degrees)))]
        dealt = None if _fits(whole, devices_per_node) else _by_node(whole, devices_per_node)
        if dealt is not None:
            order = {unit.stage: place for place, unit in enumerate(dealt)}
            units = sorted(_by_stage(degrees), key=lambda unit: order[unit.stage])
            found.append(_numbered(degrees, units, devices_per_node))
    return tuple(dict.fromkeys(found))


def _by_stage(degrees: Sequence[tuple[int, int]]) -> list[_Unit]:
    return [
        _Unit(stage, place, tensor)
        for stage, (data, tensor) in reversed(list(enumerate(degrees)))
        for place in range(data)
    ]


def _by_replica(degrees: Sequence[tuple[int, int]]) -> list[_Unit]:
    replicas = reduce(gcd, (data for data, _ in degrees), 0)
    return [
        _Unit(stage, replica * (data // replicas) + place, tensor)
        for replica in range(replicas)
        for stage, (data, tensor) in reversed(list(enumerate(degrees)))
        for place in range(data // replicas)
    ]


def _numbered(
    degrees: Sequence[tuple[int, int]], units: list[_Unit], devices_per_node: int | None
) -> tuple[tuple[int, ...], ...]:
    """The ranks of every stage if its units come in an order, or as near to it as tensor parallelism allows."""
    if devices_per_node is not None and not _fits(units, devices_per_node):
        dealt = _by_node(units, devices_per_node)
        if dealt is None:
            raise PlanError(
                f"tensor_parallel_degree of {[unit.size for unit in units]} on nodes of {devices_per_node} devices: "
                "the ranks that share a layer must be in one node or fill several; use degrees that divide each other "
                f"and {devices_per_node}, or are multiples of {devices_per_node}"
            )
        units = dealt
    ranks: dict[tuple[int, int], range] = {}
    first = 0
    for unit in units:
        ranks[unit.stage, unit.data_index] = range(first, first + unit.size)
        first += unit.size
    return tuple(
        tuple(rank for index in range(data) for rank in ranks[stage, index]) for stage, (data, _) in enumerate(degrees)
    )


def _fits(units: Sequence[_Unit], devices_per_node: int) -> bool:
    """Whether every unit lies within one node or fills several."""
    first = 0
    for unit in units:
        start, end = first % devices_per_node, (first + unit.size) % devices_per_node
        if (start or end) if unit.size > devices_per_node else start + unit.size > devices_per_node:
            return False
        first += unit.size
    return True


def _by_node(units: Sequence[_Unit], devices_per_node: int) -> list[_Unit] | None:
    """The units node by node, none in more than it fills, a unit of the last stage first; nothing if that cannot be."""
    count = -(-sum(unit.size for unit in units) // devices_per_node)
    nodes: list[list[_Unit]] = [[] for _ in range(count)]
    free = [devices_per_node] * count
    for unit in sorted(units, key=lambda unit: -unit.size):
        filled, rest = divmod(unit.size, devices_per_node) if unit.size > devices_per_node else (0, unit.size)
        own = [index for index in range(count) if free[index] == devices_per_node][:filled]
        own += [index for index in range(count) if not filled and free[index] >= rest][:1]
        if len(own) < (filled or 1) or (filled and rest):
            return None
        nodes[own[0]].append(unit)
        for index in own:
            free[index] -= devices_per_node if filled else rest
    order = {unit: index for index, unit in enumerate(units)}
    nodes.sort(key=lambda node: min((order[unit] for unit in node), default=len(units)))
    return [unit for node in nodes for unit in sorted(node, key=order.__getitem__)]


def longest_chain(numbers: Sequence[int]) -> tuple[int, ...]:
    """Of ascending numbers the longest part in which each divides the next; of equally long ones the largest."""
    best: list[tuple[int, ...]] = []
    for number in numbers:
        before = [chain for chain in best if number % chain[-1] == 0]
        best.append((*max(before, key=lambda chain: (len(chain), chain), default=()), number))
    return max(best, key=lambda chain: (len(chain), chain[::-1]), default=())
