"""Bytes of a stage unit by unit: what its working sets are the largest of."""

from dataclasses import replace
from typing import cast

import numpy as np

from lightning_mist.cost.inputs import FloatArray, StageCandidates, StageSlot
from lightning_mist.cost.memory.memory_model import MemoryModel
from lightning_mist.cost.memory.offload_bytes import resident_part
from lightning_mist.cost.memory.working_sets import UnitWorking


def bytes_of_units(model: MemoryModel, slot: StageSlot, candidates: StageCandidates) -> dict[str, FloatArray]:
    """Working sets of a single stage in each of its units: head, layers and tail.

    Returns:
        By what is computed, ``"forward"``, ``"first backward"`` and ``"backward"``, what is there of the microbatch at
        hand, and of what is made for it, beside what the units need while they run (what earlier units left), and the
        most while they run; axes for the two and for the units in the order of forward.
    """
    some, part = candidates, model
    if (offload := candidates.offload) is not None:
        pairs_VX = np.column_stack([offload.kept_KX, offload.gradients_K])
        part = cast(MemoryModel, resident_part(model, pairs_VX))
        some = replace(candidates, offload=None, variant_K=np.zeros(1, dtype=np.int64))
    degree, zero_stage = slot.shard_degree, int(some.zero_stage_K[0])
    runs = part.runs(some, part.holdings.of(some), degree, part.shares(some, degree))
    sets = part.working(slot.rows, zero_stage, degree, slot.context_parallel_degree)
    ways = [UnitWorking(item, runs) for item in (sets.without_temporaries(), sets)]
    return {
        "forward": np.stack([way.forward() for way in ways]),
        "first backward": np.stack([way.first_backward() for way in ways]),
        "backward": np.stack([way.backward() for way in ways]),
    }
