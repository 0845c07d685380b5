"""What this version can run; everything else a plan may say is refused."""

from lightning_mist.errors import PlanError
from lightning_mist.plan import ModuleMap, Plan, StagePlan, check_split


def check_supported(plan: Plan, module_map: ModuleMap) -> None:
    """Refuse a plan that asks for something the runtime cannot do.

    Args:
        plan: The plan.
        module_map: Says how the module may be split.

    Raises:
        PlanError: Naming the stage, the setting and the nearest setting that runs.
    """
    if plan.num_stages > 1 and plan.num_groups == 1:
        raise PlanError(
            f"schedule = {plan.schedule!r} with {plan.num_stages} stages on one group of devices: chunks are passed "
            "from group to group, so at least 2 are needed; use one stage with all layers"
        )
    for index, stage in enumerate(plan.stages):
        _check_stage(index, stage)
        check_split(index, stage, module_map)


def _check_stage(index: int, stage: StagePlan) -> None:
    mesh = stage.mesh
    if mesh.context_parallel_degree > 1:
        raise PlanError(
            f"stages[{index}].context_parallel_degree = {mesh.context_parallel_degree}: the runtime needs 1; use "
            f"data_parallel_degree={len(mesh.devices)} or more stages for these {len(mesh.devices)} devices"
        )
    for name in ("parameters", "gradients", "optimizer", "activations"):
        ratio = getattr(stage.offload, name)
        if ratio > 0.0:
            raise PlanError(
                f"stages[{index}].offload.{name} = {ratio}: the runtime keeps everything on the device, so the ratio "
                "must be 0; use checkpointed_layers or more stages to save memory"
            )
