"""What this version can run; everything else a plan may say is refused."""

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, StagePlan


def check_supported(plan: Plan) -> None:
    """Refuse a plan that asks for something the runtime cannot do.

    Raises:
        PlanError: Naming the stage, the setting and the nearest setting that runs.
    """
    if plan.schedule == "zb-h1":
        raise PlanError("schedule = 'zb-h1': the runtime does not split backwards; use schedule = '1f1b'")
    if plan.num_stages > 1 and plan.num_groups == 1:
        raise PlanError(
            f"schedule = {plan.schedule!r} with {plan.num_stages} stages on one group of devices: chunks are passed "
            "from group to group, so at least 2 are needed; use one stage with all layers"
        )
    for index, stage in enumerate(plan.stages):
        _check_stage(index, stage)


def _check_stage(index: int, stage: StagePlan) -> None:
    mesh = stage.mesh
    for name, degree in (
        ("tensor_parallel_degree", mesh.tensor_parallel_degree),
        ("context_parallel_degree", mesh.context_parallel_degree),
    ):
        if degree > 1:
            raise PlanError(
                f"stages[{index}].{name} = {degree}: the runtime needs 1; use data_parallel_degree="
                f"{len(mesh.devices)} or more stages for these {len(mesh.devices)} devices"
            )
    for name in ("parameters", "gradients", "optimizer", "activations"):
        ratio = getattr(stage.offload, name)
        if ratio > 0.0:
            raise PlanError(
                f"stages[{index}].offload.{name} = {ratio}: the runtime keeps everything on the device, so the ratio "
                "must be 0; use checkpointed_layers or more stages to save memory"
            )
