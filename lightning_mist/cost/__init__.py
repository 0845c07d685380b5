"""How long a plan takes and how much memory it needs: sympy expressions turned into seconds and bytes.

What takes modules needs torch, and is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from lightning_mist.cost.breakdown import least_seconds, memory_with, predict, predict_with, predictions, seconds_with
from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.chunks import stage_memory
from lightning_mist.cost.compile import compile_expressions
from lightning_mist.cost.estimate_codec import estimate_from_json, estimate_to_json
from lightning_mist.cost.estimate_data import Change, MemoryEstimate, PeakTensor, StageEstimate
from lightning_mist.cost.estimate_planned import estimate_plan
from lightning_mist.cost.estimate_predicted import estimate_prediction
from lightning_mist.cost.estimate_stages import Estimator
from lightning_mist.cost.estimate_table import render_estimate
from lightning_mist.cost.interval import Interval
from lightning_mist.cost.memory import MemoryModel, StageMemory
from lightning_mist.cost.mixed import CostModel, MixedCostModel, Profiles, cost_model, models_of, profiles_of
from lightning_mist.cost.pipeline import step_seconds, step_seconds_of
from lightning_mist.cost.replay import Alive, Replay, replay_group, replay_plan, replay_rank
from lightning_mist.cost.roofline import step_work
from lightning_mist.cost.spent import StageSpent
from lightning_mist.cost.stage import StageCostModel, StageCosts, StageSeconds

if TYPE_CHECKING:
    from lightning_mist.cost.estimate import estimate_memory

__all__ = [
    "Alive",
    "Change",
    "CostModel",
    "Estimator",
    "Interval",
    "MemoryEstimate",
    "MemoryModel",
    "MixedCostModel",
    "PeakTensor",
    "Profiles",
    "Replay",
    "StageCandidates",
    "StageCostModel",
    "StageCosts",
    "StageEstimate",
    "StageMemory",
    "StageSeconds",
    "StageSlot",
    "StageSpent",
    "compile_expressions",
    "cost_model",
    "estimate_from_json",
    "estimate_memory",
    "estimate_plan",
    "estimate_prediction",
    "estimate_to_json",
    "least_seconds",
    "memory_with",
    "models_of",
    "predict",
    "predict_with",
    "predictions",
    "profiles_of",
    "render_estimate",
    "replay_group",
    "replay_plan",
    "replay_rank",
    "seconds_with",
    "stage_memory",
    "step_seconds",
    "step_seconds_of",
    "step_work",
]


def __getattr__(name: str) -> Any:
    if name == "estimate_memory":
        from lightning_mist.cost.estimate import estimate_memory

        return estimate_memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
