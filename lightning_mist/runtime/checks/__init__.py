"""Checks with real numbers, made once before training."""

from lightning_mist.runtime.checks.gradient_differences import GradientDifferences
from lightning_mist.runtime.checks.selfcheck import Steady, check_stages, loss_of, refuse_unchecked
from lightning_mist.runtime.checks.signature import batch_signature

__all__ = ["GradientDifferences", "Steady", "batch_signature", "check_stages", "loss_of", "refuse_unchecked"]
