"""How long a plan takes and how much memory it needs: sympy expressions turned into seconds and bytes."""

from lightning_mist.cost.breakdown import (
    StageSpent,
    least_seconds,
    memory_with,
    predict,
    predict_with,
    predictions,
    seconds_with,
)
from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.chunks import stage_memory
from lightning_mist.cost.compile import compile_expressions
from lightning_mist.cost.memory import MemoryModel, StageMemory
from lightning_mist.cost.mixed import CostModel, MixedCostModel, Profiles, cost_model, models_of, profiles_of
from lightning_mist.cost.pipeline import step_seconds, step_seconds_of
from lightning_mist.cost.roofline import step_work
from lightning_mist.cost.stage import StageCostModel, StageCosts, StageSeconds

__all__ = [
    "CostModel",
    "MemoryModel",
    "MixedCostModel",
    "Profiles",
    "StageCandidates",
    "StageCostModel",
    "StageCosts",
    "StageMemory",
    "StageSeconds",
    "StageSlot",
    "StageSpent",
    "compile_expressions",
    "cost_model",
    "least_seconds",
    "memory_with",
    "models_of",
    "predict",
    "predict_with",
    "predictions",
    "profiles_of",
    "seconds_with",
    "stage_memory",
    "step_seconds",
    "step_seconds_of",
    "step_work",
]
