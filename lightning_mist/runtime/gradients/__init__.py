"""Gradients of a rank: made in one or two backwards, reduced over ranks."""

from lightning_mist.runtime.gradients.reducer import GradientReducer, UnitGradients
from lightning_mist.runtime.gradients.weight_gradients import WeightGradients
