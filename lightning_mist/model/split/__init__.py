"""Tensor and context parallelism of unmodified blocks: which layers and tokens are shared out, proved with numbers."""

from lightning_mist.model.split.optimizer_probe import GroupRule, OptimizerRule, examine_optimizer
from lightning_mist.model.split.splits import derive_contexts, derive_splits
