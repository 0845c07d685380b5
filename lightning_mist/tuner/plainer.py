"""What a plan under another schedule does without, as nothing is lost by it.

Such a plan keeps what the pipeline saves that it was made from, which was the best under the search's own schedule and
by the closed form. Where the other schedule needs less, savings are left over: kinds of state that some stage moves to
the host or shares out. As of plans of the search, one that cannot be told apart on the clock and is simpler is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeAlias

import numpy as np

from lightning_mist.cost import CostModel, predict_with, seconds_with
from lightning_mist.cost.interleaved_memory import plan_peaks
from lightning_mist.plan import OffloadRatios, Plan, ZeroStage
from lightning_mist.tuner import simpler

Fits: TypeAlias = Callable[[Plan], bool]
"""Whether a plan fits."""


def plainer(model: CostModel, plan: Plan, fits: Fits, zero_stages: Sequence[int]) -> Plan:
    """The plan with as few kinds of state moved or shared out as fit and take as long on the clock, and its prediction.

    Args:
        model: The cost model.
        plan: The plan, with its prediction.
        fits: Whether a plan fits.
        zero_stages: ZeRO stages that plans may use.
    """
    assert plan.predicted is not None
    most, best = plan.predicted.step_seconds * (1 + simpler.ALIKE), plan
    while True:
        count = len(simpler.techniques(best))
        less = (item for item in _with_less(best, zero_stages) if len(simpler.techniques(item)) < count)
        found = next((item for item in less if fits(item) and seconds_with(model, item) <= most), None)
        if found is None:
            return best if best is plan else replace(best, predicted=predict_with(model, best))
        best = found


def fits_within(
    model: CostModel, limits: Callable[[Plan], Sequence[float]], host_limits: Callable[[Plan], Sequence[float]]
) -> Fits:
    """Says of plans whether they fit.

    Args:
        model: The cost model.
        limits: Bytes that the devices of every stage of a plan may use.
        host_limits: Bytes of host memory that each of them may use.
    """

    def fits(plan: Plan) -> bool:
        layers_SM = np.array([[stage.checkpointing.layers] for stage in plan.stages])
        peaks = plan_peaks(model.memory, plan, layers_SM)
        on_device = bool(np.all(peaks.device_SM[:, 0] <= np.array(limits(plan))))
        return on_device and bool(np.all(peaks.host_SM[:, 0] <= np.array(host_limits(plan))))

    return fits


def _with_less(plan: Plan, zero_stages: Sequence[int]) -> Iterator[Plan]:
    """Plans that move one kind of state less, then those that share out less."""
    for field in fields(OffloadRatios):
        stages = tuple(replace(item, offload=replace(item.offload, **{field.name: 0.0})) for item in plan.stages)
        yield replace(plan, stages=stages, predicted=None)
    for most in sorted(zero_stages):
        stages = tuple(replace(item, zero_stage=ZeroStage(min(most, item.zero_stage))) for item in plan.stages)
        if all(item.zero_stage in zero_stages for item in stages):
            yield replace(plan, stages=stages, predicted=None)
