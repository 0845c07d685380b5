"""Checks with real numbers, made once before training."""

from lightning_mist.runtime.checks.gradient_differences import GradientDifferences
from lightning_mist.runtime.checks.selfcheck import Steady, check_stages, loss_of, refuse_unchecked
