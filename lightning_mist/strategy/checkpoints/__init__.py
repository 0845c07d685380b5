"""Checkpoints: written and read under any plan."""

from lightning_mist.strategy.checkpoints.checkpoint_hooks import Checkpoints
