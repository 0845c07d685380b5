"""Seconds of the runtime's own Python: what a stage takes beyond its operators, its transfers and its collectives.

Array axes
    K  candidates
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, StageCandidates, StageRegions, StageSlot, regions_of
from lightning_mist.hardware import StepOverheads
from lightning_mist.model.spec import ModelSpec

SPLIT_BACKWARD = 0.5
"""What an operator on tensors that ranks share out takes in backward, as a share of what it takes in forward: there
torch's autograd calls the operators, and Python only runs where ranks exchange. By the recorder, blocks of 5 operators
took 1.5 ms longer in forward and 0.9 to 1.4 ms in backward, of which an exchange is about 0.5 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadSeconds:
    """Overheads of candidates.

    Attributes:
        forward_K: In each microbatch's forward: the action, its messages, and what runs on stand-ins.
        backward_K: In each microbatch's backward, or both parts of it.
    """

    forward_K: FloatArray
    backward_K: FloatArray
    once_K: FloatArray


def overhead_seconds(
    overheads: StepOverheads, slot: StageSlot, candidates: StageCandidates, spec: ModelSpec
) -> OverheadSeconds:
    """What the runtime itself takes in stages of a slot.

    Every boundary of a stage is crossed by one message to it and one from it: an activation in forward, a gradient in
    backward, each of which is posted at both ends.
    """
    is_later_K = (candidates.start_K > 0).astype(np.float64)
    boundaries_K = is_later_K + (candidates.end_K < spec.num_layers)
    each_K = overheads.action_seconds + boundaries_K * overheads.message_seconds
    shares = slot.num_stages > 1 or slot.tensor_parallel_degree > 1
    backward_K = each_K + overheads.recomputed_layer_seconds * candidates.checkpointed_K
    if slot.schedule == "zb-h1":
        operators_R = np.array([region.backward_operators for region in regions_of(spec)], dtype=np.float64)
        operators_K = StageRegions.of(spec, candidates).sums(operators_R)
        backward_K = backward_K + overheads.deferred_operator_seconds * operators_K
    return OverheadSeconds(
        forward_K=each_K + is_later_K * spec.head.forward_operators * overheads.stand_in_seconds,
        backward_K=backward_K,
        once_K=np.full(len(candidates), overheads.once(shares_batches=shares)),
    )
