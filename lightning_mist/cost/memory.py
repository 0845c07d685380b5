"""Peak bytes of a stage's most loaded device, term by term, for many candidates at once.

What a device of stage ``i`` holds, beside everything of its process that is not a tensor:

* *Always*: the stage's parameters, the buffers of the whole module, optimizer state (under ZeRO-1 that of the
  parameters it owns), its own batch and the rows it computes on.
* *Gradients*, made by the first backward of a batch; under ZeRO-1 all of them until they are reduced to their owners.
* *Activations* of the other microbatches in flight, and buffers of what is received ahead or still being sent.
* *The working set* of the microbatch at hand: its saved bytes and the temporaries of the part being computed.

These change over a batch, so the peak is the maximum over situations (:mod:`lightning_mist.cost.phases`): a forward,
the first backward, a later backward, the filling of gradient buckets, the optimizer's step, the gathering of updated
parameters.

Array axes
    K  candidates
    U  distinct layer ranges among them
    P  parameters
    R  regions
    X  situations
    T  terms, in the order of :data:`TERMS`
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.candidates import StageCandidates, StageSlot, slots_of
from lightning_mist.cost.compile import BoolArray, FloatArray
from lightning_mist.cost.phases import Phase, stage_phases
from lightning_mist.cost.regions import ParameterTable, RegionCosts, compile_regions, covered
from lightning_mist.cost.working import StageRuns, WorkingSets
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan
from lightning_mist.plan.sharding import assign_owners

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
"""Buckets of updated parameters under way at once when ZeRO-1 gathers them."""

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
class HeldBytes:
    """What stages hold: parameters and their gradients, in bytes.

    Attributes:
        all_K: Parameters.
        trained_K: Trained parameters, and so gradients.
        head_only_K: Trained, and used by no part of the stage but its head.
        tail_K: Trained, and used by its tail.
        shared_K: Trained, and also held by another stage.
        reused_K: Trained, and used by several parts of this stage.
        largest_K: The largest trained parameter.
        count_K: Number of trained parameters, not bytes.
    """

    all_K: FloatArray
    trained_K: FloatArray
    head_only_K: FloatArray
    tail_K: FloatArray
    shared_K: FloatArray
    reused_K: FloatArray
    largest_K: FloatArray
    count_K: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """What the memory of candidates is made of. Bytes; every array has the axis ``K``.

    Attributes:
        always: What is there all the time, by term.
        gradients_K: All gradients.
        reused_K: Gradients of parameters that several parts of the stage use.
        saved_K: What one microbatch leaves behind between its forward and its backward.
        entering_K: What is received per microbatch.
        leaving_K: The gradient of what is sent per microbatch.
        returned_K: The gradient of what is received per microbatch.
        forward_K: Working set of a forward.
        first_backward_K: Working set of the backward that makes the gradients, these included.
        backward_K: Working set of another backward.
        update: The situations after the last backward: name and bytes by term, without ``always``.
    """

    always: Mapping[str, Bytes]
    gradients_K: FloatArray
    reused_K: FloatArray
    saved_K: FloatArray
    entering_K: FloatArray
    leaving_K: FloatArray
    returned_K: FloatArray
    forward_K: FloatArray
    first_backward_K: FloatArray
    backward_K: FloatArray
    update: tuple[tuple[str, Mapping[str, Bytes]], ...]

    def situations(self, phases: Iterable[Phase]) -> list[tuple[str, Mapping[str, Bytes]]]:
        """Every situation with its bytes by term, ``always`` included."""
        found: list[tuple[str, Mapping[str, Bytes]]] = [(phase.kind, self._around(phase)) for phase in phases]
        return [(name, {**self.always, **terms}) for name, terms in (*found, *self.update)]

    def peaks(self, phases: Iterable[Phase]) -> FloatArray:
        """Peak bytes over all situations."""
        peak_K = np.zeros(len(self.gradients_K))
        changing = (self._around(phase) for phase in phases)
        for terms in (*changing, *(terms for _, terms in self.update)):
            peak_K = np.maximum(peak_K, sum(terms.values()))
        return peak_K + sum(self.always.values())

    def _around(self, phase: Phase) -> dict[str, Bytes]:
        """What changes over a batch, by term."""
        gradients_K: Bytes = self.gradients_K * phase.gradients
        if phase.kind == "forward":
            working_K = self.forward_K
        elif phase.kind == "first backward":
            gradients_K, working_K = 0.0, self.first_backward_K
        else:
            # A parameter that two parts use gets its two contributions summed before they are accumulated.
            gradients_K, working_K = self.gradients_K + self.reused_K, self.backward_K
        # In a backward the gradient at hand stands where the output was, which the saved bytes still count.
        ahead = phase.received_gradients - (phase.kind != "forward" and phase.received_gradients > 0)
        transfers_K = phase.received * self.entering_K + ahead * self.leaving_K
        return {
            "gradient_bytes": gradients_K,
            "activation_bytes": phase.others * self.saved_K,
            "transfer_bytes": transfers_K + phase.sent_gradients * self.returned_K,
            "working_bytes": working_K,
        }


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
        spec: The network.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._at_rows = compile_regions(spec)
        self._table = ParameterTable.of(spec)
        self._costs: dict[float, RegionCosts] = {}
        self._working: dict[float, WorkingSets] = {}
        self._shares: dict[tuple[int, tuple[int, ...]], float] = {}

    def costs(self, rows: float) -> RegionCosts:
        """What every region costs at a number of rows."""
        if rows not in self._costs:
            self._costs[rows] = self._at_rows(rows)
        return self._costs[rows]

    def held(self, candidates: StageCandidates) -> HeldBytes:
        """Parameters and gradients of each candidate."""
        low_K, high_K = covered(self.spec, candidates.start_K, candidates.end_K)
        range_UE, inverse_K = np.unique(np.stack([low_K, high_K]), axis=1, return_inverse=True)
        inverse_K = inverse_K.reshape(-1)
        low_U, high_U = range_UE
        uses = self._table.uses_PR
        inside_PU = uses[:, high_U] - uses[:, low_U]
        held_PU = inside_PU > 0
        head_PU = (uses[:, np.minimum(low_U + 1, high_U)] - uses[:, low_U]) * (low_U == 0)
        tail_PU = (uses[:, -1] - uses[:, -2])[:, None] * (high_U == uses.shape[1] - 1)
        trained_P = self._table.trainable_P

        def trained(chosen_PU: BoolArray) -> FloatArray:
            return (trained_P @ chosen_PU.astype(np.float64))[inverse_K]

        largest_U = (trained_P[:, None] * held_PU).max(axis=0, initial=0.0)
        return HeldBytes(
            all_K=(self._table.bytes_P @ held_PU)[inverse_K],
            trained_K=trained(held_PU),
            head_only_K=trained((head_PU > 0) & (inside_PU == head_PU)),
            tail_K=trained(tail_PU > 0),
            shared_K=trained((inside_PU > 0) & (inside_PU < uses[:, -1:])),
            reused_K=trained(inside_PU > 1),
            largest_K=largest_U[inverse_K],
            count_K=((trained_P > 0).astype(np.float64) @ held_PU)[inverse_K],
        )

    def largest_share(self, candidates: StageCandidates, ranks: int) -> FloatArray:
        """Trained bytes of the data-parallel rank that owns most, by the rule of :func:`assign_owners`."""
        low_K, high_K = covered(self.spec, candidates.start_K, candidates.end_K)
        range_UE, inverse_K = np.unique(np.stack([low_K, high_K]), axis=1, return_inverse=True)
        uses, trained_P = self._table.uses_PR, self._table.trainable_P
        share_U = np.empty(range_UE.shape[1])
        for index, (low, high) in enumerate(range_UE.T):
            held_P = uses[:, high] > uses[:, low]
            share_U[index] = self._share(tuple(np.sort(trained_P[held_P]).astype(np.int64).tolist()), ranks)
        return share_U[inverse_K.reshape(-1)]

    def _share(self, sizes: tuple[int, ...], ranks: int) -> float:
        key = (ranks, sizes)
        if key not in self._shares:
            loads = [0] * ranks
            for owner, size in zip(assign_owners(sizes, ranks), sizes, strict=True):
                loads[owner] += size
            self._shares[key] = float(max(loads))
        return self._shares[key]

    def _runs(self, candidates: StageCandidates, held: HeldBytes, rows: float) -> StageRuns:
        return StageRuns(
            start_K=candidates.start_K,
            middle_K=candidates.start_K + candidates.checkpointed_K,
            end_K=candidates.end_K,
            is_first_K=candidates.start_K == 0,
            is_last_K=candidates.end_K == self.spec.num_layers,
            gradient_bytes_K=held.trained_K,
            head_gradient_bytes_K=held.head_only_K,
            tail_gradient_bytes_K=held.tail_K,
            held_gradient_K=self.costs(rows).gradient_boundary_C[candidates.end_K],
        )

    def needs(self, slot: StageSlot, candidates: StageCandidates) -> "StageNeeds":
        """Everything that the candidates' memory is made of, whatever the number of microbatches in flight.

        Of the slot only rows, degree, batch and whether there are several stages and microbatches matter.
        """
        costs, held = self.costs(slot.rows), self.held(candidates)
        if slot.rows not in self._working:
            self._working[slot.rows] = WorkingSets(costs, self._table.single_R)
        working = self._working[slot.rows]
        runs = self._runs(candidates, held, slot.rows)
        plain_K = is_plain(slot, candidates)
        owned_K = held.trained_K
        if slot.data_parallel_degree > 1:
            share_K = self.largest_share(candidates, slot.data_parallel_degree)
            owned_K = np.where(candidates.zero_stage_K > 0, share_K, held.trained_K)
        return StageNeeds(
            always={
                "parameter_bytes": held.all_K,
                "buffer_bytes": float(self.spec.buffer_bytes),
                "optimizer_bytes": self.spec.optimizer.state_bytes_per_parameter_byte * owned_K,
                "batch_bytes": slot.batches_held * self.costs(slot.batch_rows).batch_bytes,
            },
            gradients_K=held.trained_K,
            reused_K=held.reused_K,
            saved_K=working.saved(runs),
            entering_K=costs.boundary_C[candidates.start_K],
            leaving_K=costs.gradient_boundary_C[candidates.end_K],
            returned_K=costs.gradient_boundary_C[candidates.start_K],
            forward_K=working.forward(runs) + held.trained_K * plain_K,
            first_backward_K=np.where(
                plain_K,
                held.trained_K + held.reused_K + working.backward(runs),
                working.first_backward(runs),
            ),
            backward_K=working.backward(runs),
            update=tuple(self._update(slot, working, runs, held, owned_K, candidates)),
        )

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
        working: WorkingSets,
        runs: StageRuns,
        held: HeldBytes,
        owned_K: FloatArray,
        candidates: StageCandidates,
    ) -> list[tuple[str, Mapping[str, Bytes]]]:
        """Situations after gradients are complete: reduction, optimizer step, gathering."""
        optimizer = self.spec.optimizer
        step_K = (
            optimizer.step_peak_bytes_per_parameter_byte * owned_K
            + optimizer.step_peak_bytes_per_largest * np.minimum(held.largest_K, owned_K)
        )
        result: list[tuple[str, Mapping[str, Bytes]]] = [
            ("optimizer step", {"gradient_bytes": owned_K, "working_bytes": step_K})
        ]
        if slot.num_stages > 1:
            result.append(("tied gradients", {"gradient_bytes": held.trained_K, "working_bytes": held.shared_K}))
        if slot.data_parallel_degree > 1:
            bucket_K = np.minimum(held.trained_K, BUCKET_BYTES + held.largest_K)
            filled_K = working.bucket(runs, bucket_K, progressive=slot.num_microbatches == 1)
            filled_K = np.where(is_plain(slot, candidates), held.trained_K, filled_K)
            result.append(("gradient reduction", {"working_bytes": filled_K}))
            gathered_K = np.where(candidates.zero_stage_K > 0, BUCKETS_IN_FLIGHT * bucket_K, 0.0)
            gathered_K = np.minimum(gathered_K, held.trained_K)
            result.append(("parameter gathering", {"gradient_bytes": owned_K, "working_bytes": gathered_K}))
        return result


def stage_memory(spec: ModelSpec, plan: Plan) -> tuple[StageMemory, ...]:
    """The peak memory of every stage of a plan, by term.

    Args:
        spec: The network.
        plan: The plan.
    """
    model = MemoryModel(spec)
    return tuple(model.breakdown(slot, candidates)[0] for slot, candidates in slots_of(plan))
