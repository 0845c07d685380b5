"""Seconds of everything that passes over gradients and parameters: adding gradients up, and what comes once per batch.

Every pass over gradients reads and writes them. Which there are follows the runtime:

* ranks that share parameters copy their gradients into buckets and scale them, once per batch, under ZeRO-2 and ZeRO-3
  after every backward; a rank that shares them with nobody scales them where they are, if there are others at all;
* the gradient that arrives at the loss multiplies what is left to the rank, under ZeRO its own;
* a loss scale is taken out again in one more pass (``"16-mixed"``);
* under ZeRO-1 and ZeRO-2 parameters are copied into buckets by their owner and out of them by the others.

With master weights a backward makes gradients in 16 bits, which are cast and added up in 32; what is copied into
buckets is cast back, and what arrives is added up in 32 bits. A byte of the parameters is then two of every sum.

Gradients of all microbatches but the first are added to those that exist: two are read and one is written. Measured and
traced backwards have that in them. Under ZeRO-2 and ZeRO-3 they are made anew each time, and added up by their owner.

Array axes
    K  candidates
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, StageCandidates, StageSlot
from lightning_mist.cost.memory import Holdings
from lightning_mist.errors import PlanError
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ZeroStage

OPERATORS_PER_PARAMETER = 10
"""Operators of a step in a loop over parameters: ``_single_tensor_adam`` in ``torch/optim/adam.py`` launches ten."""

PASS = 2
"""Bytes moved by a pass over a byte: read and written."""

ADDITION = 3
"""Bytes moved for every byte that is added to another: both are read, the sum is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSeconds:
    """Seconds of passes over gradients and parameters.

    Attributes:
        update_K: The optimizer's step, and the other passes of once per batch.
        accumulate_K: Adding the gradients of one microbatch to those that exist, which the first one need not.
        pass_K: What the passes of one microbatch take beyond those that are in a measured or traced backward.
    """

    update_K: FloatArray
    accumulate_K: FloatArray
    pass_K: FloatArray


def update_seconds(
    machine: tuple[HardwareProfile, Cluster],
    spec: ModelSpec,
    slot: StageSlot,
    candidates: StageCandidates,
    holdings: Holdings,
) -> UpdateSeconds:
    """Seconds of candidates for a slot."""
    profile = machine[0]
    held, zero_K, degree = holdings.of(candidates), candidates.zero_stage_K, slot.shard_degree
    shares_K = (zero_K >= ZeroStage.OPTIMIZER) & (degree > 1)
    reduces_K = (zero_K >= ZeroStage.GRADIENTS) & (degree > 1)
    gives_K = shares_K & (zero_K < ZeroStage.PARAMETERS)
    owned_K = held.trained_K
    if degree > 1:
        owned_K = np.where(shares_K, holdings.shares(candidates, degree).trained_K, held.trained_K)
    rate, factor = profile.memory_bytes_per_second, spec.optimizer.gradient_bytes_per_parameter_byte
    cast = 0.0 if factor == 1.0 else 1 + factor
    # A sum is read and written, and what is added to it read: by owners as it has arrived.
    arrived_K = (2 * factor + 1) * owned_K / rate
    added_K = np.where(reduces_K, arrived_K, ADDITION * factor * held.trained_K / rate)
    # Two passes instead of the addition that is in the backward, and the owner's addition.
    passed = cast + PASS * factor + (1 + factor) - ADDITION
    more_K = (cast + ADDITION * factor - ADDITION) * held.trained_K / rate
    pass_K = np.where(reduces_K, passed * held.trained_K / rate + added_K, more_K)
    return UpdateSeconds(
        update_K=step_seconds_once(machine, spec, slot, (held.trained_K, held.count_K, owned_K), (reduces_K, gives_K)),
        accumulate_K=added_K,
        pass_K=pass_K,
    )


def step_seconds_once(
    machine: tuple[HardwareProfile, Cluster],
    spec: ModelSpec,
    slot: StageSlot,
    held: tuple[FloatArray, FloatArray, FloatArray],
    sharding: tuple[BoolArray, BoolArray],
) -> FloatArray:
    """The optimizer's step over the owned parameters, and the other passes of once per batch.

    Args:
        held: Bytes of trained parameters, their number, and bytes of those that the rank owns.
        sharding: Whether gradients are reduced in every microbatch, and whether parameters are given out.
    """
    (profile, cluster), (trained_K, number_K, owned_K), (reduces_K, gives_K) = machine, held, sharding
    optimizer = spec.optimizer
    alone = slot.shard_degree == 1
    factor = optimizer.gradient_bytes_per_parameter_byte
    # Scaled, and where they are shared copied too.
    scaled = PASS * factor * int(slot.loaders > 1) if alone else PASS * factor + (1 + factor)
    into_buckets_K = np.where(reduces_K, 0.0, scaled) * trained_K
    left_K = (1 + int(spec.precision == "16-mixed")) * factor * owned_K
    given_K = np.where(gives_K, trained_K, 0.0)
    passed_K = into_buckets_K + PASS * (left_K + given_K)
    if optimizer.step_seconds_per_parameter_byte > 0:
        measured_K: FloatArray = optimizer.step_seconds_per_parameter_byte * owned_K
        return measured_K + passed_K / profile.memory_bytes_per_second
    if optimizer.narrow_state:
        raise PlanError(
            f"no seconds of {optimizer.name}: it keeps state in {optimizer.narrow_state}, and what its kernels take "
            "does not follow from the bytes that they move. A fit times its step before it plans, and the estimate "
            "command counts its bytes"
        )
    # Only the loop implementations have temporaries of the size of one parameter.
    is_loop = optimizer.step_peak_bytes_per_largest > 0
    count_K = number_K * owned_K / np.maximum(trained_K, 1.0)
    operators_K = OPERATORS_PER_PARAMETER * (count_K if is_loop else np.minimum(number_K, 1.0))
    busy_K = (optimizer.step_moved_bytes_per_parameter_byte * owned_K + passed_K) / profile.memory_bytes_per_second
    launch_K = operators_K * profile.operator_seconds
    return np.maximum(busy_K, launch_K) if cluster.device.kind == "cuda" else busy_K + launch_K
