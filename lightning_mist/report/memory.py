"""Bytes over one step, for pictures: which stages to show, and the curves that the memory model makes of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.estimate import MemoryCurve, memory_curves
from lightning_mist.plan import Plan
from lightning_mist.report.timeline import Timeline, timeline_of
from lightning_mist.schedule import Simulation, simulate_plan

MOST_GROUPS = 6
"""Groups of devices in one picture: the one that needs most, the first, the last, and some between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPicture:
    """Bytes of a plan's devices over one step.

    Attributes:
        limits: Bytes that tensors of each device may take, for each stage; empty if that is not known.
    """

    timeline: Timeline
    curves: tuple[MemoryCurve, ...]
    limits: tuple[float, ...] = ()

    def limit(self, curve: MemoryCurve) -> float | None:
        """Bytes that tensors may take on each device of a group."""
        return self.limits[curve.group] if self.limits else None

    @property
    def worst(self) -> MemoryCurve:
        """The one with the highest peak, the first of several."""
        return max(self.curves, key=lambda curve: curve.peak_bytes)

    @property
    def shown(self) -> tuple[MemoryCurve, ...]:
        """Those to show, in their order."""
        count = len(self.curves)
        between = [round(at) for at in np.linspace(0, count - 1, MOST_GROUPS)]
        wanted = dict.fromkeys([self.worst.group, 0, count - 1, *between])
        return tuple(self.curves[group] for group in sorted(list(wanted)[:MOST_GROUPS]))


def memory_picture(plan: Plan, limits: Sequence[float] = (), simulation: Simulation | None = None) -> MemoryPicture:
    """Bytes over a plan's step by its prediction.

    Raises:
        PlanError: If nothing was predicted, or not what memory is made of.
    """
    simulation = simulation or simulate_plan(plan)
    return MemoryPicture(
        timeline=timeline_of(plan, simulation),
        curves=memory_curves(plan, simulation),
        limits=tuple(limits),
    )


def moments(curves: Sequence[MemoryCurve]) -> tuple[float, ...]:
    """When the peaks of some curves are."""
    return tuple(float(curve.times_E[curve.peak_index]) for curve in curves)
