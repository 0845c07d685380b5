"""Where the devices of a plan lie: the layout in which it takes the fewest seconds."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_mist.cost import CostModel, MixedCostModel, predict_with, seconds_with
from lightning_mist.plan import Plan
from lightning_mist.plan.layout import rank_layouts

MOST_GAIN = 0.15
"""Share of its step that a plan is taken to gain by another layout at most. Of plans for 13 and 22 billion parameters
on nodes of eight L4, between which everything takes long, the one that gained most took 0.123 less."""


def predicted_in_place(model: CostModel, plan: Plan, best: float = np.inf) -> Plan:
    """A plan with its prediction, in the fastest of its layouts; the first of those that take as long.

    On unlike devices, or with context parallelism, it stays as it is.

    Args:
        model: The cost model.
        plan: The plan.
        best: Step seconds of another plan. If this one is slower by more than a layout can gain it stays as it is too.
    """
    others = list(_others(model, plan))
    if others and (seconds := seconds_with(model, plan)) * (1 - MOST_GAIN) <= best:
        found = [(seconds, plan), *((seconds_with(model, item), item) for item in others)]
        plan = min(found, key=lambda item: item[0])[1]
    return replace(plan, predicted=predict_with(model, plan))


def _others(model: CostModel, plan: Plan) -> Iterator[Plan]:
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
