"""Tensor and context parallelism of unmodified blocks: which layers and tokens are shared out, proved with numbers."""

from lightning_mist.model.split.context_splits import derive_contexts
from lightning_mist.model.split.optimizer_coupling import counting_reason, coupling_reason, whole_tensor_reason
from lightning_mist.model.split.splits import derive_splits
