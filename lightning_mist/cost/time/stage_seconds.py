"""What stages cost, by term, and how runs have corrected it: a profile's factors on regions and on terms of stages.

Measured layers stay the first truth: corrections multiply what is made of them, and say nothing of seconds that follow
from FLOPs and bytes.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from lightning_mist.cost.inputs import ArrayRecord, FloatArray
from lightning_mist.cost.time.region_times import RegionSeconds
from lightning_mist.hardware import HardwareProfile, Term, factor_of
from lightning_mist.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds(ArrayRecord):
    """Seconds of candidates by term.

    Attributes:
        backward_K: Backward of one microbatch without recomputation.
        weight_K: The part of ``backward_K`` that makes gradients of matrices, which ZB-H1 puts off.
        exchange_K: The part of ``forward_K`` and ``backward_K`` in which tensor-parallel ranks exchange.
        recompute_exchange_K: The same part of ``recompute_K``.
        accumulate_K: The part of ``backward_K`` that adds gradients to those that exist, which the first microbatch
            need not.
        transfer_K: Receiving the input and the gradient of the output, and where the cores that compute do that, also
            sending the output and the gradient of the input.
        arrival_K: The part of ``transfer_K`` that receives the input.
        return_K: The part of ``transfer_K`` that receives the gradient of the output.
        send_K: The part of ``transfer_K`` that sends the output.
        send_back_K: The part of ``transfer_K`` that sends the gradient of the input.
        unshard_K: Unsharding parameters for one microbatch (ZeRO-3), as far as it does not hide in computation, in the
            mean of a batch; by passes it is what :class:`~lightning_mist.cost.time.Unsharding` says.
        again_K: What every further stage behind adds to ``unshard_K``, as far as microbatches are in flight between.
        scatter_K: Reducing the gradients of one microbatch to their owners (from ZeRO-2 on), as far as not hidden.
        ring_K: What sharing rows adds for one microbatch: exchanging keys and values, and waiting for each other.
        forward_ring_K: The part of ``ring_K`` that belongs to the forward.
        copies_K: Copies between device and host for one microbatch, as far as not hidden.
        forward_copies_K: The part of ``copies_K`` that belongs to the forward.
        reduce_K: Averaging gradients over the data-parallel ranks, as far as it does not hide in the last backward.
        tied_K: Summing gradients of parameters that several stages hold.
        update_K: The optimizer's step, and the other passes over gradients and parameters of once per batch.
        update_copies_K: Copies between device and host that the optimizer's step waits for.
        deferred_K: The part of ``update_K``, ``update_copies_K`` and ``gather_K`` that the next batch's first forward
            does once its input is there.
        overhead_K: What the runtime itself takes for one microbatch.
        forward_overhead_K: The part of ``overhead_K`` in forward.
        once_K: What it takes once per step.
    """

    forward_K: FloatArray
    backward_K: FloatArray
    recompute_K: FloatArray
    weight_K: FloatArray
    exchange_K: FloatArray
    recompute_exchange_K: FloatArray
    accumulate_K: FloatArray
    transfer_K: FloatArray
    arrival_K: FloatArray
    return_K: FloatArray
    send_K: FloatArray
    send_back_K: FloatArray
    unshard_K: FloatArray
    again_K: FloatArray
    forward_unshard_K: FloatArray
    backward_unshard_K: FloatArray
    begin_K: FloatArray
    forward_again_K: FloatArray
    backward_again_K: FloatArray
    scatter_K: FloatArray
    ring_K: FloatArray
    forward_ring_K: FloatArray
    copies_K: FloatArray
    forward_copies_K: FloatArray
    reduce_K: FloatArray
    tied_K: FloatArray
    update_K: FloatArray
    update_copies_K: FloatArray
    gather_K: FloatArray
    deferred_K: FloatArray
    overhead_K: FloatArray
    forward_overhead_K: FloatArray
    once_K: FloatArray

    @property
    def steady_K(self) -> FloatArray:
        """Steady time ``t``."""
        steady_K: FloatArray = self.own_times_K[0] + self.transfer_K
        return steady_K

    @property
    def own_times_K(self) -> FloatArray:
        """Steady and boundary time but for what is exchanged with other stages."""
        steady_K = self.forward_K + self.backward_K + self.recompute_K + self.unshard_K + self.scatter_K + self.ring_K
        boundary_K = self.reduce_K + self.update_K + self.update_copies_K + self.once_K + self.gather_K
        return np.stack([steady_K + self.copies_K + self.overhead_K, boundary_K])

    @property
    def exchanged_times_K(self) -> FloatArray:
        """What of steady and of boundary time is exchanged with other stages."""
        return np.stack([self.transfer_K, self.tied_K])

    @property
    def boundary_K(self) -> FloatArray:
        """Boundary time ``d``."""
        boundary_K: FloatArray = self.own_times_K[1] + self.tied_K
        return boundary_K


TOLD = tuple(field.name for field in fields(StageSeconds) if field.name != "again_K")
"""What the seconds of a stage in its place are told by."""

CORRECTED: tuple[tuple[Term, tuple[str, ...]], ...] = (
    (
        "communication",
        (
            *("transfer", "arrival", "return", "send", "send_back"),
            *("unshard", "again", "forward_unshard", "backward_unshard", "begin", "forward_again", "backward_again"),
            *("scatter", "ring", "forward_ring", "reduce", "tied", "gather"),
        ),
    ),
    ("update", ("update",)),
)
"""Which terms of a stage's seconds a correction multiplies, beside those that are made of regions."""


def computation_factor(spec: ModelSpec, profile: HardwareProfile, term: Term) -> float:
    """The factor on computation in one direction; 1 where layers were not measured."""
    return factor_of(profile.corrections, term) if spec.seconds else 1.0


def corrected_regions(spec: ModelSpec, profile: HardwareProfile, seconds: RegionSeconds) -> RegionSeconds:
    """Seconds of regions, corrected by direction where layers were measured."""
    forward, backward = (computation_factor(spec, profile, term) for term in ("forward", "backward"))
    if forward == backward == 1.0:
        return seconds
    exchange = seconds.exchange
    return replace(
        seconds,
        forward_R=seconds.forward_R * forward,
        backward_R=seconds.backward_R * backward,
        recompute_R=seconds.recompute_R * forward,
        exchange=None if exchange is None else (exchange[0] * forward, exchange[1] * backward),
    )


def corrected_terms(profile: HardwareProfile, seconds: StageSeconds) -> StageSeconds:
    """Seconds of stages whose regions are corrected already, the other terms corrected too."""
    if not profile.corrections:
        return seconds
    found = replace(
        seconds,
        **{
            f"{name}_K": getattr(seconds, f"{name}_K") * factor_of(profile.corrections, term)
            for term, names in CORRECTED
            for name in names
        },
    )
    # Which of these terms are deferred nobody has kept apart.
    before_K, after_K = (item.update_K + item.update_copies_K + item.gather_K for item in (seconds, found))
    deferred_K = seconds.deferred_K * np.divide(after_K, before_K, out=np.ones_like(before_K), where=before_K > 0)
    return replace(found, deferred_K=deferred_K)
