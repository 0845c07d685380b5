"""A plan for people, in one line."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from lightning_mist.plan.plan import Plan, StagePlan
from lightning_mist.plan.stage_settings import OFFLOAD_KINDS


def settings_of(plan: Plan) -> str:
    """Stages, devices, microbatches and what every stage does to fit, in words; what is not used is not mentioned.

    Returns:
        For example ``"4 stages, each data parallel 2 x tensor parallel 4; 64 microbatches of 2 rows; ZeRO-1; recompute
        12, 9, 6, 3 of 12 layers"``.
    """
    stages = plan.stages[: plan.num_groups]
    parts = [
        _places(plan),
        _microbatches(plan),
        _zero(plan.stages),
        _recomputed(plan),
        f"{chunks} chunks behind the last layer" if (chunks := plan.stages[-1].tail_chunks) > 1 else "",
        _offloaded(plan.stages),
    ]
    uneven = len({stage.num_layers for stage in stages}) > 1
    layers = f"layers {_listed(_per_group(plan, lambda stage: stage.num_layers))}" if uneven else ""
    return "; ".join(part for part in (parts[0], layers, *parts[1:]) if part)


def _places(plan: Plan) -> str:
    stages = plan.stages[: plan.num_groups]
    kinds = [_mesh(stage) for stage in stages]
    if len(stages) == 1:
        head = "1 stage"
    elif plan.num_groups < plan.num_stages:
        head = f"{len(stages)} stages of {plan.num_stages // plan.num_groups} interleaved chunks"
    else:
        head = f"{len(stages)} stages" + {"1f1b": "", "interleaved-1f1b": ""}.get(plan.schedule, f" ({plan.schedule})")
    if len(set(kinds)) == 1:
        each = ", each" if len(stages) > 1 else ","
        return f"{head}{each} {kinds[0]}" if kinds[0] else head
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return f"{head}: " + ", then ".join(f"{count} with {kind or '1 device'}" for kind, count in runs)


def _mesh(stage: StagePlan) -> str:
    mesh, words = stage.mesh, []
    if mesh.data_parallel_degree > 1:
        words.append(f"data {mesh.data_parallel_degree}")
    if mesh.tensor_parallel_degree > 1:
        words.append(f"tensor {mesh.tensor_parallel_degree}" + (" + sequence" if mesh.sequence_parallel else ""))
    if mesh.context_parallel_degree > 1:
        words.append(f"context {mesh.context_parallel_degree}")
    return " x ".join(words)


def _microbatches(plan: Plan) -> str:
    rows = _listed([stage.microbatch_size for stage in plan.stages[: plan.num_groups]])
    many = "1 microbatch" if plan.num_microbatches == 1 else f"{plan.num_microbatches} microbatches"
    return f"{many} of {rows} {'row' if rows == '1' else 'rows'}"


def _zero(stages: Sequence[StagePlan]) -> str:
    levels = [int(stage.zero_stage) for stage in stages]
    return f"ZeRO-{_listed(levels)}{_hybrid(stages)}" if any(levels) else ""


def hybrid(stage: StagePlan) -> str:
    """Groups of ranks that shard, and ranks of each: ``2 x 8``; empty if all ranks of the stage are one group."""
    mesh = stage.mesh
    return f"{mesh.num_peers // mesh.shard_ranks} x {mesh.shard_ranks}" if mesh.shard_degree else ""


def _hybrid(stages: Sequence[StagePlan]) -> str:
    found = [hybrid(stage) or "whole" for stage in stages]
    return f" HSDP {_listed(found)}" if set(found) != {"whole"} else ""


def _recomputed(plan: Plan) -> str:
    counts = _per_group(plan, lambda stage: stage.checkpointing.layers)
    layers = _per_group(plan, lambda stage: stage.num_layers)
    if not any(counts):
        return ""
    kinds = [stage.checkpointing.kind for stage in plan.stages if stage.checkpointing.layers]
    what = "" if set(kinds) == {"full"} else f", {_listed(kinds)}"
    if counts == layers:
        return f"recompute all layers{what}"
    return f"recompute {_listed(counts)} of {_listed(layers)} layers{what}"


def _offloaded(stages: Sequence[StagePlan]) -> str:
    """What is in host memory: all of a kind where nothing else is said."""
    found = []
    for kind, ratios in _ratios(stages).items():
        share = "" if min(ratios) == 1.0 else " " + _listed([f"{ratio:.0%}" for ratio in ratios])
        found.append(f"{kind}{share}")
    return f"on the host: {', '.join(found)}" if found else ""


def _ratios(stages: Sequence[StagePlan]) -> dict[str, list[float]]:
    """Ratios of all stages, of what is told of any."""
    told = {kind for stage in stages for kind, _ in stage.offload.told}
    return {kind: [stage.offload.of(kind) for stage in stages] for kind in OFFLOAD_KINDS if kind in told}


def _per_group(plan: Plan, value: Callable[[StagePlan], int]) -> list[int]:
    """A sum over the chunks of every group of devices."""
    groups = range(plan.num_groups)
    return [sum(value(plan.stages[chunk]) for chunk in plan.chunks(group)) for group in groups]


def _listed(values: Sequence[int | str]) -> str:
    """One value if all are alike, else all of them, runs shortened: ``3, 2 (4 times), 1``."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    if len(runs) == 1:
        return str(runs[0][0])
    return ", ".join(str(value) if count == 1 else f"{value} ({count} times)" for value, count in runs)


def recipe_of(plan: Plan) -> str:
    """A plan in one line, as launchers of Megatron or torchtitan would be told it; what is not used is not mentioned.

    Returns:
        For example ``"tp 8, pp 4, dp 2, vpp 3, zero 1, recompute 4 of 24, microbatch 2 x 32"``: degrees of tensor,
        pipeline and data parallelism, chunks of each group of devices, layers recomputed of all, rows of a microbatch
        and how many there are. What differs from stage to stage is said from the least to the most.
    """
    groups = plan.stages[: plan.num_groups]
    meshes = [stage.mesh for stage in groups]
    layers = _per_group(plan, lambda stage: stage.num_layers)
    recomputed = [stage.checkpointing.kind for stage in plan.stages if stage.checkpointing.layers]
    kinds = "" if set(recomputed) <= {"full"} else f" {' and '.join(sorted(set(recomputed)))}"
    of_layers = f" ({_span(layers)} layers each)" if max(layers) - min(layers) > 1 else ""
    schedule = "" if plan.schedule in ("1f1b", "interleaved-1f1b") else f" by {plan.schedule}"
    data, tensor, context = (
        [getattr(mesh, f"{name}_parallel_degree") for mesh in meshes] for name in ("data", "tensor", "context")
    )
    offloaded = [
        f"{kind} {_span([round(100 * ratio) for ratio in ratios])}%" for kind, ratios in _ratios(groups).items()
    ]
    parts = {
        f"tp {_span(tensor)}{' with sp' if any(mesh.sequence_parallel for mesh in meshes) else ''}": max(tensor) > 1,
        f"cp {_span(context)}": max(context) > 1,
        f"pp {plan.num_groups}{of_layers}{schedule}": plan.num_groups > 1,
        f"dp {_span(data)}": max(data) > 1 or len(groups) == 1,
        f"vpp {plan.num_stages // plan.num_groups}": plan.num_groups < plan.num_stages,
        f"zero {_span([int(stage.zero_stage) for stage in groups])}{_hybrid(groups).lower()}": any(
            stage.zero_stage for stage in groups
        ),
        f"recompute {sum(stage.checkpointing.layers for stage in plan.stages)} of {plan.num_layers}{kinds}": recomputed,
        f"tail in {plan.stages[-1].tail_chunks} chunks": plan.stages[-1].tail_chunks > 1,
        f"offload {' and '.join(offloaded)}": offloaded,
        f"microbatch {_span([stage.microbatch_size for stage in groups])} x {plan.num_microbatches}": True,
        f"loaders {plan.data_parallel_size}": plan.data_parallel_size,
    }
    return ", ".join(part for part, is_used in parts.items() if is_used)


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of numbers that follow each other, in their order."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"
