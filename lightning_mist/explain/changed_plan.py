"""Plans changed in one way: arranged otherwise, in one stage, without chunks, with other microbatches or layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_mist.errors import PlanError
from lightning_mist.plan import OFFLOADED, Checkpointing, Plan, SearchSpace, StageMesh, StagePlan, ZeroStage
from lightning_mist.tuner.space import divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the changes of a plan have to keep to."""

    cuts_batches: bool
    search: SearchSpace


def microbatch_counts(plan: Plan, data_degrees: Sequence[int], ground: Ground) -> tuple[int, ...]:
    """Numbers of microbatches for which every stage cuts every device's batch into equal parts, ascending."""
    total, loaders = plan.global_batch_size, plan.num_loaders

    def is_equal(count: int, degree: int) -> bool:
        together = count * degree
        return together % loaders == 0 == total % together and (together == loaders or ground.cuts_batches)

    asked = ground.search.num_microbatches
    return tuple(
        count
        for count in divisors(total)
        if all(is_equal(count, degree) for degree in data_degrees)
        and (asked is None or count in asked)
        and (plan.schedule != "interleaved-1f1b" or count % plan.num_groups == 0)
    )


def with_microbatches(plan: Plan, count: int) -> Plan:
    """The same plan with another number of microbatches."""
    rows = plan.global_batch_size // count
    stages = tuple(replace(stage, microbatch_size=rows // stage.data_parallel_degree) for stage in plan.stages)
    return replace(plan, num_microbatches=count, stages=stages, predicted=None)


def _rearranged(
    plan: Plan, stages: Sequence[StagePlan], shapes: Sequence[tuple[int, int, bool]], ground: Ground
) -> Plan:
    """Stages whose devices are arranged otherwise, ``(data, tensor, sequence)``, and stay where they are.

    Microbatches are as large as they can be, but no larger than those of the plan, if there are such.
    """
    degrees = [data for data, _, _ in shapes]
    most = max(stage.microbatch_size for stage in plan.stages)
    counts = microbatch_counts(plan, degrees, ground)
    if not counts:
        raise PlanError(
            f"data-parallel degrees {degrees} with {plan.global_batch_size} rows on {plan.world_size} devices: no "
            "number of microbatches cuts every device's batch into equal parts"
        )
    rows = {count: plan.global_batch_size // (count * min(degrees)) for count in counts}
    count = min(counts, key=lambda count: (rows[count] > most, abs(rows[count] - most)))
    made = tuple(
        replace(
            stage,
            mesh=StageMesh(
                devices=stage.devices,
                data_parallel_degree=data,
                tensor_parallel_degree=tensor,
                sequence_parallel=sequence,
            ),
            microbatch_size=plan.global_batch_size // (count * data),
            zero_stage=stage.zero_stage if data > 1 else ZeroStage.NONE,
        )
        for stage, (data, tensor, sequence) in zip(stages, shapes, strict=True)
    )
    return replace(plan, num_microbatches=count, stages=made, predicted=None)


def one_stage(plan: Plan, ground: Ground) -> Plan:
    """Everything on all devices, with as much of every other technique as any stage uses.

    Raises:
        PlanError: If that leaves no number of microbatches, or stages share layers between unlike numbers of devices.
    """
    tensor = max(stage.mesh.tensor_parallel_degree for stage in plan.stages)
    sequence = any(stage.mesh.sequence_parallel for stage in plan.stages)
    most = {name: max(getattr(stage.offload, name) for stage in plan.stages) for name in OFFLOADED}
    stage = replace(
        plan.stages[0],
        layers=(0, plan.num_layers),
        mesh=StageMesh(devices=tuple(range(plan.world_size)), data_parallel_degree=plan.world_size),
        zero_stage=max(stage.zero_stage for stage in plan.stages),
        checkpointing=_joined(plan.stages),
        offload=replace(plan.stages[0].offload, **most),
    )
    data, rest = divmod(plan.world_size, tensor)
    if rest:
        raise PlanError(f"tensor-parallel degree {tensor} does not divide {plan.world_size} devices")
    return _rearranged(without_chunks(plan), (stage,), [(data, tensor, sequence)], ground)


def _joined(stages: Sequence[StagePlan]) -> Checkpointing:
    """What one stage recomputes in place of several: as many layers, by operator if that is enough for all."""
    kinds = [stage.checkpointing.kind for stage in stages if stage.checkpointing.layers]
    layers = sum(stage.checkpointing.layers for stage in stages)
    return Checkpointing(layers=layers, kind="selective" if set(kinds) == {"selective"} else "full")


def without_chunks(plan: Plan) -> Plan:
    """An interleaved plan's devices as they are, with one stage each, under 1F1B."""
    if plan.schedule != "interleaved-1f1b":
        return replace(plan, schedule="1f1b" if plan.schedule == "zb-h1" else plan.schedule, predicted=None)
    stages, first = [], 0
    for group in range(plan.num_groups):
        chunks = [plan.stages[index] for index in plan.chunks(group)]
        end = first + sum(chunk.num_layers for chunk in chunks)
        kept = _joined(chunks)
        stages.append(replace(chunks[0], layers=(first, end), checkpointing=kept))
        first = end
    return replace(plan, stages=tuple(stages), schedule="1f1b", predicted=None)


def whole_layers(plan: Plan, ground: Ground) -> Plan:
    """The same plan with no layer shared between devices, which become data-parallel ranks.

    Raises:
        PlanError: If that leaves no number of microbatches.
    """
    shapes = [(len(stage.devices), 1, False) for stage in plan.stages[: plan.num_groups]]
    if plan.num_groups == plan.num_stages:
        return _rearranged(plan, plan.stages, shapes, ground)
    chunks = len(plan.stages) // plan.num_groups
    joined = without_chunks(plan)
    made = _rearranged(joined, joined.stages, shapes, ground)
    if made.num_microbatches % plan.num_groups:
        raise PlanError("microbatches go through chunks in rounds of as many as there are groups of devices")
    stages = tuple(
        replace(stage, mesh=mine.mesh, microbatch_size=mine.microbatch_size)
        for stage, mine in zip(plan.stages, made.stages * chunks, strict=True)
    )
    return replace(plan, num_microbatches=made.num_microbatches, stages=stages, predicted=None)


def every_stage(plan: Plan, change: Callable[[StagePlan], StagePlan]) -> Plan:
    """The same plan with every stage changed; without its prediction."""
    return replace(plan, stages=tuple(map(change, plan.stages)), predicted=None)


def even_lengths(plan: Plan) -> tuple[int, ...]:
    """Layers of every stage if they are dealt out evenly."""
    count, stages = plan.num_layers, plan.num_stages
    return tuple(count * (index + 1) // stages - count * index // stages for index in range(stages))


def with_lengths(plan: Plan, lengths: Sequence[int]) -> Plan:
    """The same plan with other numbers of layers per stage; of recomputed ones as many as there are then."""
    stages, first = [], 0
    for stage, length in zip(plan.stages, lengths, strict=True):
        kept = replace(stage.checkpointing, layers=min(length, stage.checkpointing.layers))
        stages.append(replace(stage, layers=(first, first + length), checkpointing=kept))
        first += length
    return replace(plan, stages=tuple(stages), predicted=None)
