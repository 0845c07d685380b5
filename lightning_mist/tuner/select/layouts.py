"""Where the devices of a plan lie: the layout in which it takes the fewest seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost import CostModel, MixedCostModel, least_seconds, seconds_with
from lightning_mist.plan import Plan
from lightning_mist.plan.rank_order import rank_layouts

MOST_GAIN = 0.15
"""Share of its step that a plan is taken to gain by another layout at most. Of plans for 13 and 22 billion parameters
on nodes of eight L4, between which everything takes long, the one that gained most took 0.123 less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """A plan in all its layouts.

    Attributes:
        plans: The plan, and the same in its other layouts.
        floors: Seconds that a step of each takes at least.
    """

    plans: tuple[Plan, ...]
    floors: tuple[float, ...]

    @property
    def floor(self) -> float:
        """Seconds that a step takes at least in any layout."""
        return min(self.floors)

    def fastest(self, model: CostModel, best: float = np.inf) -> tuple[Plan, float]:
        """The plan in the fastest of its layouts, the first of those that take as long, and its seconds on the clock.

        Args:
            best: Step seconds of another plan. If this one is slower by more than a layout can gain it stays as it is.
        """
        plan, *others = self.plans
        least = seconds_with(model, plan)
        if least * (1 - MOST_GAIN) > best:
            return plan, least
        for other, floor in zip(others, self.floors[1:], strict=True):
            if floor < least and (seconds := seconds_with(model, other)) < least:
                plan, least = other, seconds
        return plan, least


def in_every_layout(model: CostModel, plans: Sequence[Plan]) -> list[Layouts]:
    """Some plans in all their layouts; on unlike devices, or with context parallelism, they stay as they are."""
    every = [(plan, *_others(model, plan)) for plan in plans]
    floors = iter(least_seconds(model, [item for found in every for item in found]))
    return [Layouts(plans=found, floors=tuple(next(floors) for _ in found)) for found in every]


def _others(model: CostModel, plan: Plan) -> tuple[Plan, ...]:
    meshes = [stage.mesh for stage in plan.stages]
    if isinstance(model, MixedCostModel) or len(meshes) == 1 or any(m.context_parallel_degree > 1 for m in meshes):
        return ()
    degrees = [(mesh.data_parallel_degree, mesh.tensor_parallel_degree) for mesh in meshes]
    found = []
    for layout in rank_layouts(degrees, model.cluster.devices_per_node):
        if any(mesh.devices != devices for mesh, devices in zip(meshes, layout, strict=True)):
            stages = tuple(
                replace(stage, mesh=replace(stage.mesh, devices=devices))
                for stage, devices in zip(plan.stages, layout, strict=True)
            )
            found.append(replace(plan, stages=stages))
    return tuple(found)
