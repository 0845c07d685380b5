"""What this version can run; everything else a plan may say is refused."""

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, StagePlan


def check_supported(plan: Plan) -> None:
    """Refuse a plan that asks for something the runtime cannot do.

    Raises:
        PlanError: Naming the stage, the setting and the nearest setting that runs.
    """
    if plan.schedule not in ("1f1b", "gpipe"):
        raise PlanError(f"schedule = {plan.schedule!r}: the runtime runs '1f1b' and 'gpipe'; use schedule = '1f1b'")
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
