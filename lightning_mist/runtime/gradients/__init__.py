"""Gradients of a rank: made in one or two backwards, reduced over ranks."""

from lightning_mist.runtime.gradients.reducer import GradientReducer
from lightning_mist.runtime.gradients.unit_gradients import UnitGradients
from lightning_mist.runtime.gradients.weight_gradients import WeightGradients
