"""Peak bytes of a stage's most loaded device, term by term, for many candidates at once.

What a device of stage ``i`` holds, beside everything of its process that is not a tensor:

* *Always*: the stage's parameters (under ZeRO-3 those it owns), the buffers of the whole module, optimizer state (from
  ZeRO-1 on that of the parameters it owns), its own batch and the rows it computes on.
* *Gradients*, made by the first backward of a batch; under ZeRO-1 all of them until they are reduced to their owners.
  From ZeRO-2 on every backward makes them, part by part, and what this rank owns of them stays.
* *Activations* of the other microbatches in flight, and buffers of what is received ahead or still being sent.
* *The working set* of the microbatch at hand: its saved bytes and the temporaries of the part being computed; from
  ZeRO-2 on gradients that are being reduced, under ZeRO-3 the parameters of the part and of the next one.

These change over a batch, so the peak is the maximum over situations (:mod:`lightning_mist.cost.phases`): a forward,
the first backward, a later backward, the filling of gradient buckets, the optimizer's step, the gathering of updated
parameters.

Array axes
    K  candidates
    R  regions
    X  situations
    T  terms, in the order of :data:`TERMS`
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.compile import BoolArray, FloatArray
from lightning_mist.cost.held import HeldBytes, Holdings
from lightning_mist.cost.phases import Phase, PhaseKind, stage_phases
from lightning_mist.cost.regions import RegionCosts, compile_regions, covered
from lightning_mist.cost.working import Sharding, StageRuns, WorkingSets
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ZeroStage

TERMS = (
    "parameter_bytes",
    "buffer_bytes",
    "optimizer_bytes",
    "batch_bytes",
    "gradient_bytes",
    "activation_bytes",
    "transfer_bytes",
    "working_bytes",
)
"""Terms of a peak. Where a backward makes the gradients they are part of ``working_bytes``."""

BUCKET_BYTES = 25 * 2**20
"""Capacity of a gradient bucket: the default ``bucket_cap_mb`` of ``torch.nn.parallel.DistributedDataParallel``."""

BUCKETS_IN_FLIGHT = 2
"""Buckets of updated parameters under way at once when ZeRO-1 and ZeRO-2 gather them."""

Bytes: TypeAlias = FloatArray | float
"""Bytes of each candidate, or of all alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak of one stage.

    Attributes:
        phase: When it happens.
        terms: Bytes by term at that time, as ``(name, bytes)`` in the order of :data:`TERMS`.
    """

    phase: str
    terms: tuple[tuple[str, int], ...]

    @property
    def peak_bytes(self) -> int:
        """The sum of all terms."""
        return sum(value for _, value in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """What the memory of candidates is made of. Bytes; every array has the axis ``K``.

    Attributes:
        always: What is there all the time, by term.
        gradients_K: All gradients.
        reused_K: Gradients of parameters that several parts of the stage use.
        pending_K: Gradients of the last backward that are still being reduced in a forward.
        saved_K: What one microbatch leaves behind between its forward and its backward.
        entering_K: What is received per microbatch.
        leaving_K: The gradient of what is sent per microbatch.
        returned_K: The gradient of what is received per microbatch.
        forward_K: Working set of a forward.
        first_backward_K: Working set of the backward that makes the gradients, these included.
        backward_K: Working set of another backward.
        input_backward_K: Working set of a backward that makes input gradients only.
        waiting_K: What one microbatch leaves behind from its input gradients until its weight gradients.
        weight_backward_K: Working set of weight gradients: what they need, and the largest of them.
        update: The situations after the last backward: name and bytes by term, without ``always``.
    """

    always: Mapping[str, Bytes]
    gradients_K: FloatArray
    reused_K: FloatArray
    pending_K: FloatArray
    saved_K: FloatArray
    entering_K: FloatArray
    leaving_K: FloatArray
    returned_K: FloatArray
    forward_K: FloatArray
    first_backward_K: FloatArray
    backward_K: FloatArray
    input_backward_K: FloatArray
    waiting_K: FloatArray
    weight_backward_K: FloatArray
    update: tuple[tuple[str, Mapping[str, Bytes]], ...]

    def first(self, count: int) -> "StageNeeds":
        """Those of the first candidates."""

        def cut(terms: Mapping[str, Bytes]) -> dict[str, Bytes]:
            return {name: value if isinstance(value, float) else value[:count] for name, value in terms.items()}

        arrays = {name: getattr(self, name)[:count] for name in self.__slots__ if name.endswith("_K")}
        update = tuple((name, cut(terms)) for name, terms in self.update)
        return replace(self, always=cut(self.always), update=update, **arrays)

    def situations(self, phases: Iterable[Phase]) -> list[tuple[str, Mapping[str, Bytes]]]:
        """Every situation with its bytes by term, ``always`` included."""
        found: list[tuple[str, Mapping[str, Bytes]]] = [(phase.kind, self._around(phase)) for phase in phases]
        return [(name, {**self.always, **terms}) for name, terms in (*found, *self.update)]

    def peaks(self, phases: Sequence[Phase]) -> FloatArray:
        """Peak bytes over all situations."""
        # One matrix product instead of as many sums as there are situations: what :meth:`_around` says, by factors.
        peak_K = np.zeros(len(self.gradients_K))
        parts_FK = np.stack(
            [
                self.gradients_K,
                self.pending_K,
                self.saved_K,
                self.waiting_K,
                self.entering_K,
                self.leaving_K,
                self.returned_K,
            ]
        )
        for kind in dict.fromkeys(phase.kind for phase in phases):
            factors = np.array([_factors(phase) for phase in phases if phase.kind == kind])
            peak_K = np.maximum(peak_K, self._working(kind) + (factors @ parts_FK).max(axis=0))
        for _, terms in self.update:
            peak_K = np.maximum(peak_K, sum(terms.values()))
        return peak_K + sum(self.always.values())

    def _working(self, kind: PhaseKind) -> FloatArray:
        """The working set of what is computed."""
        if kind == "backward":
            return self.backward_K + self.reused_K
        found: FloatArray = getattr(self, f"{kind.replace(' ', '_')}_K")
        return found

    def _around(self, phase: Phase) -> dict[str, Bytes]:
        """What changes over a batch, by term."""
        gradients, pending, others, waiting, received, ahead, sent = _factors(phase)
        gradients_K: Bytes = self.gradients_K * gradients + self.pending_K * pending
        working_K = self._working(phase.kind)
        if phase.kind == "backward":
            # A parameter that two parts use gets its two contributions summed before they are accumulated.
            gradients_K, working_K = gradients_K + self.reused_K, self.backward_K
        return {
            "gradient_bytes": gradients_K,
            "activation_bytes": others * self.saved_K + waiting * self.waiting_K,
            "transfer_bytes": received * self.entering_K + ahead * self.leaving_K + sent * self.returned_K,
            "working_bytes": working_K,
        }


def _factors(phase: Phase) -> tuple[float, ...]:
    """How often a situation counts gradients, pending ones, saved bytes, those kept for weights, and transfers."""
    # In an input gradient's computation the gradient at hand stands where the output was, which the saved bytes count.
    is_forward, is_weights = phase.kind == "forward", phase.kind == "weight backward"
    ahead = phase.received_gradients - (not is_forward and not is_weights and phase.received_gradients > 0)
    # Weight gradients are there when the first of them have been made.
    gradients = is_weights or phase.kind == "backward" or (phase.gradients and phase.kind != "first backward")
    pending = is_forward and phase.gradients
    counts = (phase.others, phase.waiting, phase.received, ahead, phase.sent_gradients)
    return (float(gradients), float(pending), *counts)


def _phases(slot: StageSlot) -> tuple[Phase, ...]:
    return stage_phases(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)


def is_plain(slot: StageSlot, candidates: StageCandidates) -> BoolArray:
    """Which candidates are what torch's ``DistributedDataParallel`` does, which then runs them.

    Its buckets are made with the module and hold all gradients from one step to the next.
    """
    whole = slot.num_stages == 1 and slot.num_microbatches == 1
    plain_K: BoolArray = (candidates.zero_stage_K == 0) & (candidates.checkpointed_K == 0) & whole
    return plain_K


class MemoryModel:
    """Peak memory of stages of one network; keeps what it has computed.

    Args:
        spec: The network, or one tensor-parallel rank's part of it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._at_rows = compile_regions(spec)
        self.holdings = Holdings(spec)
        self._costs: dict[float, RegionCosts] = {}
        self._working: dict[tuple[float, int, int], WorkingSets] = {}

    def costs(self, rows: float) -> RegionCosts:
        """What every region costs at a number of rows."""
        if rows not in self._costs:
            self._costs[rows] = self._at_rows(rows)
        return self._costs[rows]

    def working(self, rows: float, zero_stage: int, degree: int) -> WorkingSets:
        """Working sets at a number of rows; of ZeRO stages below 2 those of one rank."""
        if zero_stage < ZeroStage.GRADIENTS or degree == 1:
            zero_stage, degree = 0, 1
        key = (rows, zero_stage, degree)
        if key not in self._working:
            table, sharding = self.holdings.table, self._sharding(zero_stage, degree) if degree > 1 else None
            self._working[key] = WorkingSets(self.costs(rows), table.single_R, sharding)
        return self._working[key]

    def _sharding(self, zero_stage: int, degree: int) -> Sharding:
        trained_R = self.holdings.table.trained_R
        unsharded_R = np.zeros(len(trained_R) + 1)
        if zero_stage >= ZeroStage.PARAMETERS:
            unsharded_R = self.holdings.away(degree)
        return Sharding(
            kept=1 / degree,
            reduced_R=np.concatenate([trained_R[1:], [0.0]]),
            forward_R=unsharded_R[1:],
            backward_R=unsharded_R[:-1],
        )

    def _runs(self, candidates: StageCandidates, held: HeldBytes, rows: float) -> StageRuns:
        low_K, _ = covered(self.spec, candidates.start_K, candidates.end_K)
        return StageRuns(
            start_K=candidates.start_K,
            middle_K=candidates.start_K + candidates.checkpointed_K,
            end_K=candidates.end_K,
            is_first_K=candidates.start_K == 0,
            is_last_K=candidates.end_K == self.spec.num_layers,
            gradient_bytes_K=held.trained_K,
            head_gradient_bytes_K=held.head_only_K,
            tail_gradient_bytes_K=held.tail_K,
            last_gradient_bytes_K=self.holdings.table.trained_R[low_K],
            held_gradient_K=self.costs(rows).gradient_boundary_C[candidates.end_K],
        )

    def needs(self, slot: StageSlot, candidates: StageCandidates) -> "StageNeeds":
        """Everything that the candidates' memory is made of, whatever the number of microbatches in flight.

        Of the slot only rows, degree, batch and whether there are several stages and microbatches matter.
        """
        costs, held, degree = self.costs(slot.rows), self.holdings.of(candidates), slot.data_parallel_degree
        runs = self._runs(candidates, held, slot.rows)
        owned_K, kept_K, parameters_K = self._owned(candidates, held, degree)
        working_ZK = self._working_sets(slot, candidates, runs)
        plain_K = is_plain(slot, candidates)
        plain_first_K = held.trained_K + held.reused_K + working_ZK[2]
        return StageNeeds(
            always={
                "parameter_bytes": parameters_K,
                "buffer_bytes": float(self.spec.buffer_bytes),
                "optimizer_bytes": self.spec.optimizer.state_bytes_per_parameter_byte * owned_K,
                "batch_bytes": slot.batches_held * self.costs(slot.batch_rows).batch_bytes,
            },
            gradients_K=kept_K,
            reused_K=held.reused_K,
            pending_K=working_ZK[3],
            saved_K=self.working(slot.rows, 0, 1).saved(runs),
            entering_K=costs.boundary_C[candidates.start_K],
            leaving_K=costs.gradient_boundary_C[candidates.end_K],
            returned_K=costs.gradient_boundary_C[candidates.start_K],
            forward_K=working_ZK[0] + held.trained_K * plain_K,
            first_backward_K=np.where(plain_K, plain_first_K, working_ZK[1]),
            backward_K=working_ZK[2],
            input_backward_K=working_ZK[4],
            waiting_K=working_ZK[5],
            weight_backward_K=working_ZK[5] + held.largest_K,
            update=tuple(self._update(slot, runs, held, owned_K, kept_K, candidates)),
        )

    def _owned(
        self, candidates: StageCandidates, held: HeldBytes, degree: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Bytes of the parameters that a rank updates, of the gradients and of the parameters that it keeps."""
        if degree == 1:
            return held.trained_K, held.trained_K, held.all_K
        zero_K = candidates.zero_stage_K
        share_K = self.holdings.largest_share(candidates, degree)
        parameters_K = held.all_K
        if (zero_K >= ZeroStage.PARAMETERS).any():
            dealt_K = self.holdings.largest_share(candidates, degree, frozen=True)
            parameters_K = np.where(zero_K >= ZeroStage.PARAMETERS, dealt_K, parameters_K)
        owned_K = np.where(zero_K >= ZeroStage.OPTIMIZER, share_K, held.trained_K)
        return owned_K, np.where(zero_K >= ZeroStage.GRADIENTS, share_K, held.trained_K), parameters_K

    def _working_sets(self, slot: StageSlot, candidates: StageCandidates, runs: StageRuns) -> FloatArray:
        """By ZeRO stage: of a forward, a first and a later backward; what is pending; of inputs only, and its rest."""
        found = np.empty((6, len(candidates)))
        for zero_stage in np.unique(candidates.zero_stage_K):
            working = self.working(slot.rows, int(zero_stage), slot.data_parallel_degree)
            backwards = (working.first_backward(runs), working.backward(runs))
            apart = (working.input_backward(runs), working.waiting(runs))
            values = np.stack([working.forward(runs), *backwards, working.pending(runs), *apart])
            found = np.where(candidates.zero_stage_K == zero_stage, values, found)
        return found

    def peaks(self, slot: StageSlot, candidates: StageCandidates) -> FloatArray:
        """Peak bytes of each candidate."""
        return self.needs(slot, candidates).peaks(_phases(slot))

    def breakdown(self, slot: StageSlot, candidates: StageCandidates) -> tuple[StageMemory, ...]:
        """The peak of each candidate, by term."""
        situations = self.needs(slot, candidates).situations(_phases(slot))
        terms_XTK = np.zeros((len(situations), len(TERMS), len(candidates)))
        for situation, (_, values) in enumerate(situations):
            for name, value in values.items():
                terms_XTK[situation, TERMS.index(name)] = value
        at_K = terms_XTK.sum(axis=1).argmax(axis=0)
        return tuple(
            StageMemory(
                phase=situations[at][0],
                terms=tuple((term, round(value)) for term, value in zip(TERMS, terms_XTK[at, :, index], strict=True)),
            )
            for index, at in enumerate(at_K)
        )

    def _update(
        self,
        slot: StageSlot,
        runs: StageRuns,
        held: HeldBytes,
        owned_K: FloatArray,
        kept_K: FloatArray,
        candidates: StageCandidates,
    ) -> list[tuple[str, Mapping[str, Bytes]]]:
        """Situations after gradients are complete: reduction, optimizer step, gathering."""
        optimizer, zero_K = self.spec.optimizer, candidates.zero_stage_K
        step_K = (
            optimizer.step_peak_bytes_per_parameter_byte * owned_K
            + optimizer.step_peak_bytes_per_largest * np.minimum(held.largest_K, owned_K)
        )
        result: list[tuple[str, Mapping[str, Bytes]]] = [
            ("optimizer step", {"gradient_bytes": owned_K, "working_bytes": step_K})
        ]
        if slot.num_stages > 1:
            result.append(("tied gradients", {"gradient_bytes": kept_K, "working_bytes": held.shared_K}))
        if slot.data_parallel_degree > 1:
            bucket_K = np.minimum(held.trained_K, BUCKET_BYTES + held.largest_K)
            working = self.working(slot.rows, 0, 1)
            filled_K = working.bucket(runs, bucket_K, progressive=slot.num_microbatches == 1)
            filled_K = np.where(is_plain(slot, candidates), held.trained_K, filled_K)
            filled_K = np.where(zero_K >= ZeroStage.GRADIENTS, 0.0, filled_K)
            result.append(("gradient reduction", {"working_bytes": filled_K}))
            gathers_K = (zero_K >= ZeroStage.OPTIMIZER) & (zero_K < ZeroStage.PARAMETERS)
            gathered_K = np.minimum(np.where(gathers_K, BUCKETS_IN_FLIGHT * bucket_K, 0.0), held.trained_K)
            result.append(("parameter gathering", {"gradient_bytes": owned_K, "working_bytes": gathered_K}))
        return result
