"""How long a plan takes and how much memory it needs: sympy expressions turned into seconds and bytes."""

from lightning_mist.cost.breakdown import predict, predict_with
from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.chunks import stage_memory
from lightning_mist.cost.compile import compile_expressions
from lightning_mist.cost.memory import MemoryModel, StageMemory
from lightning_mist.cost.pipeline import step_seconds, step_seconds_of
from lightning_mist.cost.stage import StageCostModel, StageCosts, StageSeconds

__all__ = [
    "MemoryModel",
    "StageCandidates",
    "StageCostModel",
    "StageCosts",
    "StageMemory",
    "StageSeconds",
    "StageSlot",
    "compile_expressions",
    "predict",
    "predict_with",
    "stage_memory",
    "step_seconds",
    "step_seconds_of",
]
