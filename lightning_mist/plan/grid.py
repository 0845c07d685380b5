"""A plan from degrees alone, equal stages that are the same for every device; and which ranks belong to which stage."""

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from math import gcd
from typing import Literal, NamedTuple

from lightning_mist.errors import PlanError
from lightning_mist.plan.plan import Plan, ScheduleName, StagePlan
from lightning_mist.plan.stage_settings import Checkpointing, CheckpointingKind, OffloadRatios, StageMesh, ZeroStage


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


def plan_of(
    num_layers: int,
    *,
    world_size: int,
    global_batch_size: int,
    data_parallel_degree: int | None = None,
    tensor_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    sequence_parallel: bool = False,
    pipeline_stages: int = 1,
    chunks: int = 1,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    zero_stage: int = 0,
    shard_degree: int | None = None,
    checkpointed_layers: int | Literal["all"] = 0,
    checkpointing: CheckpointingKind = "full",
    schedule: ScheduleName = "1f1b",
    offload: OffloadRatios | None = None,
    devices_per_node: int | None = None,
) -> Plan:
    """A plan whose stages are all alike.

    Args:
        world_size: Number of devices; all are used.
        global_batch_size: Rows that one batch brings over all devices.
        data_parallel_degree: Replicas of every stage; by default what the other degrees leave of the devices.
        pipeline_stages: Groups of devices that layers are dealt to.
        chunks: Stages of each group, more than one under ``"interleaved-1f1b"`` only.
        num_microbatches: Parts of a batch; by default as many as ``microbatch_size`` makes, or one for each device that
            works on the same rows, since each of them brings a batch.
        microbatch_size: Rows of each part on one data-parallel rank; by default what ``num_microbatches`` leaves.
        shard_degree: Ranks that ZeRO shards over; by default all with the same parameters.
        checkpointed_layers: How many of the first layers of every stage are recomputed in backward, or ``"all"``.
        checkpointing: What of these is recomputed, all or all but products, convolutions and attention.
        devices_per_node: Devices of each node, which tensor-parallel devices do not leave.

    Every device loads a batch if each part of a microbatch then comes from one of them. If not, every replica loads
    one.

    Raises:
        PlanError: If degrees, devices, layers and rows do not divide; the message names the nearest numbers that do.
    """
    _check_degrees((tensor_parallel_degree, context_parallel_degree, pipeline_stages, chunks), schedule, zero_stage)
    shared = tensor_parallel_degree * context_parallel_degree * pipeline_stages
    data = _data_degree(data_parallel_degree, shared, world_size)
    rows, count = _rows(global_batch_size, data, num_microbatches, microbatch_size, shared)
    per_stage = _layers_of_each(num_layers, pipeline_stages * chunks)
    groups = [(data, tensor_parallel_degree * context_parallel_degree)] * pipeline_stages
    meshes = [
        StageMesh(
            devices=devices,
            data_parallel_degree=data,
            tensor_parallel_degree=tensor_parallel_degree,
            context_parallel_degree=context_parallel_degree,
            sequence_parallel=sequence_parallel,
            shard_degree=shard_degree,
        )
        for devices in rank_layout(groups, devices_per_node)
    ]
    layers = per_stage if checkpointed_layers == "all" else checkpointed_layers
    stages = tuple(
        StagePlan(
            layers=(index * per_stage, (index + 1) * per_stage),
            mesh=mesh,
            microbatch_size=rows,
            zero_stage=ZeroStage(zero_stage),
            checkpointing=Checkpointing(layers=layers, kind=checkpointing),
            offload=offload or OffloadRatios(),
        )
        for index, mesh in enumerate(meshes * chunks)
    )
    return Plan(
        global_batch_size=global_batch_size,
        num_microbatches=count,
        schedule=schedule,
        # Where parts would be of several devices' batches, every copy of the pipeline loads one.
        data_parallel_size=None if count * data % world_size == 0 else data,
        stages=stages,
    )


def _check_degrees(degrees: tuple[int, ...], schedule: ScheduleName, zero_stage: int) -> None:
    """Refuse what no number of devices makes possible: tensor, context and pipeline degrees, and chunks."""
    if min(degrees) < 1:
        raise PlanError(
            f"degrees {degrees} (tensor_parallel_degree, context_parallel_degree, pipeline_stages, chunks): each must "
            "be at least 1"
        )
    if not 0 <= zero_stage <= ZeroStage.PARAMETERS:
        raise PlanError(f"zero_stage = {zero_stage}: ZeRO has stages 0 to 3")
    chunks = degrees[-1]
    if chunks > 1 and schedule != "interleaved-1f1b":
        raise PlanError(
            f"chunks = {chunks} under schedule {schedule!r}: a group of devices runs several stages under "
            "'interleaved-1f1b' only; use it, or chunks=1"
        )


def _data_degree(wanted: int | None, shared: int, world_size: int) -> int:
    if wanted is None:
        if world_size % shared or world_size < shared:
            raise PlanError(
                f"{world_size} devices with tensor x context x pipeline degrees of {shared}: their product must divide "
                f"the number of devices; use {_nearest_divisor(world_size, shared)}, or "
                f"{max(1, round(world_size / shared)) * shared} devices"
            )
        return world_size // shared
    if wanted < 1 or wanted * shared != world_size:
        raise PlanError(
            f"data_parallel_degree = {wanted} with tensor x context x pipeline degrees of {shared}: their product "
            f"must be the number of devices, {world_size}; "
            + (
                f"use data_parallel_degree={world_size // shared}"
                if world_size % shared == 0
                else f"use {max(1, wanted) * shared} devices"
            )
        )
    return wanted


def _rows(global_batch_size: int, data: int, count: int | None, rows: int | None, shared: int) -> tuple[int, int]:
    """Rows of a microbatch, and how many of them."""
    if global_batch_size < 1:
        raise PlanError(f"global_batch_size = {global_batch_size}: at least one row is needed; give a batch's rows")
    for name, value in (("num_microbatches", count), ("microbatch_size", rows)):
        if value is not None and value < 1:
            raise PlanError(f"{name} = {value}: at least 1 is needed")
    if global_batch_size % data:
        raise PlanError(
            f"global_batch_size = {global_batch_size} over data_parallel_degree = {data}: every replica takes as many "
            f"rows; use {_multiples(global_batch_size, data)} rows"
        )
    each = global_batch_size // data
    if count is None and rows is not None and each % rows:
        raise PlanError(
            f"microbatch_size = {rows} with {each} rows for each of {data} data-parallel replicas: it must divide "
            f"them; use microbatch_size={_nearest_divisor(each, rows)}"
        )
    if count is None:
        count = _nearest_divisor(each, shared) if rows is None else each // rows
    if rows is None:
        rows = max(1, each // count)
    if rows * count != each:
        raise PlanError(
            f"global_batch_size = {global_batch_size} over data_parallel_degree = {data} with microbatch_size = {rows} "
            f"and num_microbatches = {count}: {data} x {rows} x {count} = {data * rows * count} rows are not "
            f"{global_batch_size}; use global_batch_size={data * rows * count}, or num_microbatches="
            f"{_nearest_divisor(each, count)} with microbatch_size={each // _nearest_divisor(each, count)}"
        )
    return rows, count


def _layers_of_each(num_layers: int, stages: int) -> int:
    if num_layers % stages:
        raise PlanError(
            f"{num_layers} layers in {stages} stages: with degrees every stage has as many; use "
            f"{_nearest_divisor(num_layers, stages)} stages, or a plan file, whose stages may differ"
        )
    return num_layers // stages


def _nearest_divisor(number: int, wanted: int) -> int:
    """Of the divisors of a number the one nearest to another, the smaller of two."""
    divisors = [value for value in range(1, number + 1) if number % value == 0]
    return min(divisors or [1], key=lambda value: (abs(value - wanted), value))


def _multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)
