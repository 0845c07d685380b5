"""A plan in a few words."""

from collections.abc import Sequence

from lightning_mist.plan.plan import Plan


def short_name(plan: Plan) -> str:
    """What distinguishes a plan: ``2 stages x dp 1, G=8, ZeRO 1, 4 of 12 layers recomputed``.

    Args:
        plan: The plan. ``dp``, ``tp``, ``cp`` are its data-, tensor- and context-parallel degrees, ``G`` its number of
            microbatches; where stages differ, the values of all of them follow each other.
    """
    groups = plan.stages[: plan.num_groups]
    meshes = [stage.mesh for stage in groups]
    count = f"{plan.num_stages} {'stage' if plan.num_stages == 1 else 'stages'}"
    if plan.num_groups < plan.num_stages:
        count += f" in {plan.num_groups} groups"
    degrees = [
        f"{name} {_each(values)}"
        for name, values in (
            ("dp", [mesh.data_parallel_degree for mesh in meshes]),
            ("tp", [mesh.tensor_parallel_degree for mesh in meshes]),
            ("cp", [mesh.context_parallel_degree for mesh in meshes]),
        )
        if name == "dp" or max(values) > 1
    ]
    parts = [" x ".join([count, *degrees]), f"G={plan.num_microbatches}"]
    layers = [stage.num_layers for stage in plan.stages]
    if max(layers) - min(layers) > 1:
        parts.append(f"layers {_each(layers)}")
    if plan.num_stages > 1 and plan.schedule != "1f1b":
        parts.append(plan.schedule)
    if any(mesh.sequence_parallel for mesh in meshes):
        parts.append("sequence parallel")
    if any(stage.zero_stage for stage in groups):
        parts.append(f"ZeRO {_each([int(stage.zero_stage) for stage in groups])}")
    recomputed = sum(stage.checkpointing.layers for stage in plan.stages)
    if recomputed:
        parts.append(f"{recomputed} of {plan.num_layers} layers recomputed")
    if any(stage.offload.any for stage in groups):
        parts.append("offload")
    return ", ".join(parts)


def _each(values: Sequence[int]) -> str:
    """The value if all are equal, else all of them."""
    return str(values[0]) if len(set(values)) == 1 else "-".join(map(str, values))
