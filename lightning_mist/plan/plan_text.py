"""A plan for people, in one line."""

from collections.abc import Iterable, Sequence

from lightning_mist.plan.plan import Plan, StagePlan
from lightning_mist.plan.stage_settings import OFFLOAD_KINDS


def hybrid(stage: StagePlan) -> str:
    """Groups of ranks that shard, and ranks of each: ``2 x 8``; empty if all ranks of the stage are one group."""
    mesh = stage.mesh
    return f"{mesh.num_peers // mesh.shard_ranks} x {mesh.shard_ranks}" if mesh.shard_degree else ""


def recipe_of(plan: Plan) -> str:
    """A plan in one line, as launchers of Megatron or torchtitan would be told it; what is not used is not mentioned.

    Returns:
        For example ``"tp 8, pp 4, dp 2, vpp 3, zero 1, recompute 4 of 24, microbatch 2 x 32"``: degrees of tensor,
        pipeline and data parallelism, chunks of each group of devices, layers recomputed of all, rows of a microbatch
        and how many there are. What differs from stage to stage is said from the least to the most.
    """
    groups = plan.stages[: plan.num_groups]
    meshes = [stage.mesh for stage in groups]
    chunks = [[plan.stages[index] for index in plan.chunks(group)] for group in range(plan.num_groups)]
    layers = [sum(stage.num_layers for stage in stages) for stages in chunks]
    recomputed = [stage.checkpointing.kind for stage in plan.stages if stage.checkpointing.layers]
    kinds = "" if set(recomputed) <= {"full"} else f" {' and '.join(sorted(set(recomputed)))}"
    of_layers = f" ({_span(layers)} layers each)" if max(layers) - min(layers) > 1 else ""
    schedule = "" if plan.schedule in ("1f1b", "interleaved-1f1b") else f" by {plan.schedule}"
    data, tensor, context = (
        [getattr(mesh, f"{name}_parallel_degree") for mesh in meshes] for name in ("data", "tensor", "context")
    )
    told = {kind for stage in groups for kind, _ in stage.offload.told}
    offloaded = [
        f"{kind} {_span([round(100 * stage.offload.of(kind)) for stage in groups])}%"
        for kind in OFFLOAD_KINDS
        if kind in told
    ]
    sharded = dict.fromkeys(hybrid(stage) or "whole" for stage in groups)
    within = "" if set(sharded) == {"whole"} else f" hsdp {' and '.join(sharded)}"
    parts = {
        f"tp {_span(tensor)}{' with sp' if any(mesh.sequence_parallel for mesh in meshes) else ''}": max(tensor) > 1,
        f"cp {_span(context)}": max(context) > 1,
        f"pp {plan.num_groups}{of_layers}{schedule}": plan.num_groups > 1,
        f"dp {_span(data)}": max(data) > 1 or len(groups) == 1,
        f"vpp {plan.num_stages // plan.num_groups}": plan.num_groups < plan.num_stages,
        f"zero {_span([int(stage.zero_stage) for stage in groups])}{within}": any(stage.zero_stage for stage in groups),
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
