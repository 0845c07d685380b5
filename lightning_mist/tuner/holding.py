"""Whether devices and their hosts can hold a network at all, before anything is searched.

However a plan deals them out, parameters and optimizer state are somewhere at least once between two steps.
"""

import numpy as np

from lightning_mist.cost import CostModel
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.mixed import MixedStages, Stages
from lightning_mist.units import format_bytes


def kept_bytes(model: CostModel) -> float:
    """Bytes of all parameters and of the optimizer state of those that are trained.

    Args:
        model: The cost model of the network.
    """
    table, spec = model.whole.holdings.table, model.spec
    return float(table.bytes_P.sum() + spec.optimizer.state_bytes_per_parameter_byte * table.trainable_P.sum())


def held_bytes(stages: Stages) -> float:
    """Bytes that all devices may use together with their hosts; infinite where a host has no limit.

    Args:
        stages: What stages may be, and what they may use.
    """
    parts = (
        zip(stages.parts, stages.sizes, strict=True)
        if isinstance(stages, MixedStages)
        else ((stages, stages.space.world_size),)
    )
    return sum(count * (part.memory_limit + _of_host(part)) for part, count in parts)


def _of_host(part: IntraStage) -> float:
    return part.host_limit if part.space.offload_ratios else 0.0


def too_large(stages: Stages) -> str | None:
    """Why a network is too large for all devices and hosts together, for people; nothing if it need not be.

    Args:
        stages: What stages may be, and what they may use.
    """
    kept, held = kept_bytes(stages.model), held_bytes(stages)
    if kept <= held or not np.isfinite(held):
        return None
    hosts = " and their hosts" if stages.space.offload_ratios else ""
    return (
        f"Parameters and optimizer state alone are {format_bytes(kept)}, of which all {stages.space.world_size} "
        f"devices{hosts} together may hold {format_bytes(held)}. "
    )
