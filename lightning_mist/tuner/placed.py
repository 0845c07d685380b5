"""Where the devices of a plan lie: the layout in which it takes the fewest seconds."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_mist.cost import CostModel, MixedCostModel, predict_with, seconds_with
from lightning_mist.plan import Plan
from lightning_mist.plan.layout import rank_layouts


def predicted_in_place(model: CostModel, plan: Plan) -> Plan:
    """A plan with its prediction, in the fastest of its layouts; the first of those that take as long.

    On unlike devices, or with context parallelism, it stays as it is.

    Args:
        model: The cost model.
        plan: The plan.
    """
    layouts = list(_layouts(model, plan))
    best = min(layouts, key=lambda item: seconds_with(model, item)) if len(layouts) > 1 else plan
    return replace(best, predicted=predict_with(model, best))


def _layouts(model: CostModel, plan: Plan) -> Iterator[Plan]:
    yield plan
    meshes = [stage.mesh for stage in plan.stages]
    if isinstance(model, MixedCostModel) or len(meshes) == 1 or any(m.context_parallel_degree > 1 for m in meshes):
        return
    degrees = [(mesh.data_parallel_degree, mesh.tensor_parallel_degree) for mesh in meshes]
    for layout in rank_layouts(degrees, model.cluster.devices_per_node):
        if any(mesh.devices != devices for mesh, devices in zip(meshes, layout, strict=True)):
            stages = tuple(
                replace(stage, mesh=replace(stage.mesh, devices=devices))
                for stage, devices in zip(plan.stages, layout, strict=True)
            )
            yield replace(plan, stages=stages)
