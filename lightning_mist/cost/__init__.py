"""How long a plan takes and how much memory it needs: sympy expressions turned into seconds and bytes."""

from lightning_mist.cost.inputs import StageCandidates, StageSlot, compile_expressions
from lightning_mist.cost.interleaved_memory import stage_memory
from lightning_mist.cost.memory import MemoryModel, StageMemory
from lightning_mist.cost.mixed_model import CostModel, MixedCostModel, Profiles, cost_model, models_of, profiles_of
from lightning_mist.cost.prediction import least_seconds, predict, predict_with, predictions, seconds_with, with_units
from lightning_mist.cost.stage_model import StageCostModel
from lightning_mist.cost.step_time import step_seconds, step_seconds_of
