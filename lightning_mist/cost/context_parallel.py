"""Context parallelism: what the devices hold that share the sequence of every row.

With degree ``c`` each of them computes on ``s / c`` tokens of the same rows, with all parameters of its stage. So
batch, activations and what stages exchange are those of the shorter sequence; parameters and gradients are not divided,
and ZeRO shares out over data times context parallelism. Keys and values go around in a ring (Liu et al., 2023): while a
layer runs, forward or backward, a device has copies of queries, keys and values, of the block of keys and values that
arrives, and of the output, besides what its layers keep. They are taken for six hidden states of its part of the
sequence, ``6 b (s / c) h`` elements; with fewer heads of keys and values than of queries they are less.

Array axes
    R  regions
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lightning_mist.errors import PlanError
from lightning_mist.model.spec import ModelSpec

if TYPE_CHECKING:
    from lightning_mist.cost.regions import RegionCosts

RING_STATES = 6
"""Hidden states of a device's part of the sequence that its ring takes while a layer runs."""


def part_of_sequence(spec: ModelSpec, degree: int) -> int | None:
    """Tokens that each of ``degree`` devices sees of every row; ``None`` for a network without sequences and degree 1.

    Raises:
        PlanError: If the sequence cannot be shared out.
    """
    if degree == 1:
        return spec.sequence_length
    if spec.sequence_length is None:
        raise PlanError(
            f"context_parallel_degree = {degree}: {spec.name} was traced without a sequence dimension, which is what "
            "it shares out; use context_parallel_degree = 1"
        )
    if spec.sequence_length % degree:
        raise PlanError(
            f"context_parallel_degree = {degree}: it must divide the sequence length {spec.sequence_length}; use "
            f"{max(d for d in range(1, degree) if spec.sequence_length % d == 0)}"
        )
    return spec.sequence_length // degree


def hidden_state_bytes(costs: "RegionCosts") -> float:
    """What a layer hands on: one hidden state, and the few small tensors that cross cuts beside it."""
    return float(max(costs.boundary_C.max(initial=0.0), costs.checkpointed_saved_R[1:-1].max(initial=0.0)))


def with_ring(costs: "RegionCosts") -> "RegionCosts":
    """Costs whose peaks hold the buffers of the ring, in every layer."""
    ring_R = np.full(len(costs.saved_R), RING_STATES * hidden_state_bytes(costs))
    ring_R[[0, -1]] = 0.0
    return replace(
        costs,
        forward_peak_R=costs.forward_peak_R + ring_R,
        recompute_forward_peak_R=costs.recompute_forward_peak_R + ring_R,
        backward_peak_R=costs.backward_peak_R + ring_R,
        first_backward_peak_R=costs.first_backward_peak_R + ring_R,
        recompute_backward_peak_R=costs.recompute_backward_peak_R + ring_R,
        first_recompute_backward_peak_R=costs.first_recompute_backward_peak_R + ring_R,
    )
