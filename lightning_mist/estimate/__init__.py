"""What a plan will need of every device: replay, allocator, closed form, verdicts.

What takes modules needs torch, and is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from lightning_mist.estimate.device_need import Interval
from lightning_mist.estimate.estimate_data import WORDS, MemoryEstimate, StageEstimate, as_data, estimate_to_json
from lightning_mist.estimate.estimate_table import (
    SweepPoint,
    combinations,
    parse_sweep,
    render_estimate,
    render_sweep,
    sweep_to_json,
)
from lightning_mist.estimate.memory_curve import MemoryCurve, memory_curves
from lightning_mist.estimate.picture import COLORS, draw_memory
from lightning_mist.estimate.plan_estimate import estimate_plan, estimate_prediction, limit_of
from lightning_mist.estimate.stage_estimates import Estimator, stage_device

if TYPE_CHECKING:
    from lightning_mist.estimate.module_estimate import estimate_memory


def __getattr__(name: str) -> Any:
    if name == "estimate_memory":
        from lightning_mist.estimate.module_estimate import estimate_memory

        return estimate_memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
