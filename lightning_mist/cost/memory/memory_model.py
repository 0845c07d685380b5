"""Peak bytes of a stage's most loaded device, term by term, for many candidates at once.

What a device of stage ``i`` holds, beside everything of its process that is not a tensor:

* *Always*: the stage's parameters (under ZeRO-3 those it owns), the buffers of the whole module, optimizer state (from
  ZeRO-1 on that of the parameters it owns), its own batch and the rows it computes on.
* *Gradients*, made by the first backward of a batch; under ZeRO-1 all of them until they are reduced to their owners.
  From ZeRO-2 on every backward makes them, part by part, and what this rank owns of them stays.
* *Activations* of the other microbatches in flight, and buffers of what is received ahead or still being sent.
* *The working set* of the microbatch at hand: its saved bytes and the temporaries of the part being computed; from
  ZeRO-2 on gradients that are being reduced, under ZeRO-3 the parameters of the part and of the next one.

The peak is the maximum over moments (:mod:`lightning_mist.cost.memory.moments`): a forward, the first and a later
backward, the filling of gradient buckets, the optimizer's step, the gathering of updated parameters.

Array axes
    K  candidates
    R  regions
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import (
    BoolArray,
    FloatArray,
    IntArray,
    RegionCosts,
    StageCandidates,
    StageSlot,
    compile_regions,
    covered,
)
from lightning_mist.cost.memory.held_parameters import (
    BUCKETS_IN_FLIGHT,
    HeldBytes,
    Holdings,
    SharedOut,
    VariantHoldings,
)
from lightning_mist.cost.memory.moments import Moments, device_moments
from lightning_mist.cost.memory.offload_shares import StateShares
from lightning_mist.cost.memory.pass_bytes import Accumulated, PassBytes, Sharding, StageRuns, UnitLoads
from lightning_mist.cost.memory.split_backward import SplitBackward, SplitBackwardModel
from lightning_mist.cost.memory.stage_bytes import Bytes, StageNeeds, Updates, parts_of, terms_at
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ZeroStage
from lightning_mist.plan.tensor_split import stripes_of

TERMS = (
    "parameter_bytes",
    "buffer_bytes",
    "optimizer_bytes",
    "batch_bytes",
    "gradient_bytes",
    "activation_bytes",
    "transfer_bytes",
    "working_bytes",
    "offload_bytes",
)
"""Terms of a peak. Where a backward makes the gradients they are part of ``working_bytes``; ``offload_bytes`` are the
buffers of what passes between device and host memory."""

MOST_VARIANTS = 16
"""Sets of variants of a network that are kept."""

MOST_TABLES = 8
"""Working sets of variants that are kept: tables of 25 variants of 40 layers take 1 MB, and a millisecond to make."""


Pairs: TypeAlias = tuple[tuple[float, ...], ...]
"""Ratios of what layers keep, and of gradients."""

Adjustment: TypeAlias = Callable[[RegionCosts], RegionCosts]
"""What changes about the costs of regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak of one stage.

    Attributes:
        terms: Bytes by term at that time, as ``(name, bytes)`` in the order of :data:`TERMS`.
        host_bytes: Pinned host memory that each of its devices needs for what it offloads.
    """

    phase: str
    terms: tuple[tuple[str, int], ...]
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The sum of all terms."""
        return sum(value for _, value in self.terms)


def device_memory(
    chunks: Sequence[StageNeeds], always: Mapping[str, Bytes], update: Updates, moments: Moments, host_K: FloatArray
) -> tuple[StageMemory, ...]:
    """The peak of each candidate by term, on devices that run one stage or several.

    Args:
        always: What is there all the time, of all stages together; what comes after the last backward likewise.
        host_K: Pinned host memory of each.
    """
    parts_K = parts_of(chunks)
    found = [*((moment.kind, terms_at(moment, parts_K)) for moment in moments), *update]
    terms_by_moment_K = np.zeros((len(found), len(TERMS), parts_K.shape[1]))
    for index, (_, terms) in enumerate(found):
        for name, value in (*always.items(), *terms.items()):
            terms_by_moment_K[index, TERMS.index(name)] += value
    at_K = terms_by_moment_K.sum(axis=1).argmax(axis=0)
    return tuple(
        StageMemory(
            phase=found[at][0],
            terms=tuple(
                (term, round(value)) for term, value in zip(TERMS, terms_by_moment_K[at, :, index], strict=True)
            ),
            host_bytes=round(host_K[index]),
        )
        for index, at in enumerate(at_K)
    )


def moments_of(slot: StageSlot) -> Moments:
    """The moments of the stages of a slot."""
    return device_moments(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)


class ResidentMemory:
    """Peak memory of stages of one network that offload nothing; keeps what it has computed.

    Args:
        like: That of a network which may have the same parameters, and do something else with them: then what stages
            hold of them is worked out once for both.
    """

    def __init__(self, spec: ModelSpec, like: "ResidentMemory | None" = None) -> None:
        self.spec = spec
        self._at_rows = compile_regions(spec)
        self._split_backwards: dict[int, SplitBackwardModel] = {}
        self._adjustment: Adjustment | None = None
        self._is_variant = False
        self._variants: dict[Pairs, ResidentMemory] = {}
        self._parted: dict[float, Holdings] = {}
        self._whole: Holdings
        if like is None or (like.spec.parameters, like.spec.module_map) != (spec.parameters, spec.module_map):
            self._whole = Holdings(spec)
            self.states = StateShares(self._whole)
        else:
            self._whole, self.states, self._parted = like._whole, like.states, like._parted
        self._begin(self._whole)

    def _begin(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self._costs: dict[tuple[float, int], RegionCosts] = {}
        self._loads: dict[tuple[float, int, int, bool], UnitLoads] = {}

    def variants(self, key: Pairs, build: Callable[[], tuple[VariantHoldings, Adjustment]]) -> "ResidentMemory":
        """Variants of the network with other parameters and changed costs of regions, built once for each key.

        Which of them a candidate is of is said by its ``variant_K``.
        """
        if key not in self._variants:
            made, (holdings, adjustment) = copy(self), build()
            made._adjustment, made._is_variant = adjustment, True
            made._begin(holdings)
            self._variants[key] = made
            while len(self._variants) > MOST_VARIANTS:
                del self._variants[next(iter(self._variants))]
        return self._variants[key]

    def parted(self, ratio: float) -> Holdings:
        """Parameters where so much of the gradients is offloaded: those of it count as not trained."""
        if ratio not in self._parted:
            offloaded_P = self.states.offloaded(ratio, trained=True)
            whole = self._whole
            self._parted[ratio] = (
                Holdings(self.spec, whole.table.training(~offloaded_P)) if offloaded_P.any() else whole
            )
        return self._parted[ratio]

    def costs(self, rows: float, context: int = 1) -> RegionCosts:
        """What every region costs at a number of rows, on one of the devices that share the sequence."""
        key = (rows, context)
        if key not in self._costs:
            costs = self._at_rows(rows, context)
            self._costs[key] = costs if self._adjustment is None else self._adjustment(costs)
        return self._costs[key]

    def loads(
        self, rows: float, zero_stage: int, degree: int, context: int = 1, *, is_split: bool = False
    ) -> UnitLoads:
        """What units bring, take and need at a number of rows; of ZeRO stages below 2 on one rank."""
        if zero_stage < ZeroStage.GRADIENTS or degree == 1:
            degree = 1
        key = (rows, degree, context, is_split)
        if key not in self._loads:
            split_backward = self._exact_split(int(rows), context) if is_split and rows == int(rows) else None
            table, sharding, is_one_unit = self.holdings.table, None, self.holdings.is_one_unit
            if degree > 1:
                sharding = Sharding(gradient_share=1 / degree, trained_R=table.trained_R, is_one_unit=is_one_unit)
            made = self.costs(rows, context), table.single_R, sharding, split_backward
            self._loads[key] = UnitLoads(*made, accumulated=Accumulated.of(self.spec.optimizer, table))
        if self._is_variant:
            # What was asked for last comes last.
            self._loads[key] = self._loads.pop(key)
            while len(self._loads) > MOST_TABLES:
                del self._loads[next(iter(self._loads))]
        return self._loads[key]

    def _exact_split(self, rows: int, context: int) -> SplitBackward | None:
        """Backwards of inputs only from allocations, with what is adjusted of whole ones."""
        whole, costs, part = self._at_rows(rows, context), self.costs(rows, context), self.spec.on_row_part(context)
        if part is None:
            return None
        if context not in self._split_backwards:
            self._split_backwards[context] = SplitBackwardModel(part)
        if (found := self._split_backwards[context].of(whole, rows)) is None:
            return None
        more_R = costs.recompute_backward_peak_R - whole.recompute_backward_peak_R
        peak_R = found.peak_R + (costs.backward_peak_R - whole.backward_peak_R)
        return replace(found, peak_R=peak_R, recompute_peak_R=found.recompute_peak_R + more_R)

    def shares(self, candidates: StageCandidates, degree: int) -> SharedOut | None:
        """What the fullest rank has, if any candidate deals out anything."""
        if degree == 1 or not (candidates.zero_stage_K >= ZeroStage.OPTIMIZER).any():
            return None
        return self.holdings.shares(candidates, degree)

    def runs(self, candidates: StageCandidates, held: HeldBytes, degree: int, shares: SharedOut | None) -> StageRuns:
        """Candidates as runs of layers."""
        low_K, _ = covered(self.spec, candidates.start_K, candidates.end_K)
        at_K = low_K if candidates.variant_K is None else (candidates.variant_K, low_K)
        imbalance_K, away = np.zeros(len(candidates)), (np.zeros((4, len(candidates))),) * 2
        zero_K, sent_K = candidates.zero_stage_K, np.ones(len(candidates))
        if shares is not None:
            sent_K = sent_K + self.holdings.is_even / degree
            # Of what several parts use a gradient is whole until the first of them has run.
            waits_K = held.reused_K * (1 - 1 / degree) * self.holdings.is_even
            more_K = shares.trained_K - held.trained_K / degree + waits_K
            imbalance_K = np.where(zero_K >= ZeroStage.GRADIENTS, more_K, 0.0)
            shards_K = zero_K >= ZeroStage.PARAMETERS
            away = shares.forward_RK * shards_K, shares.backward_RK * shards_K
        return StageRuns(
            start_K=candidates.start_K,
            middle_K=candidates.start_K + candidates.checkpointed_K,
            end_K=candidates.end_K,
            gradient_bytes_K=held.trained_K,
            head_gradient_bytes_K=held.head_only_K,
            tail_gradient_bytes_K=held.tail_K,
            last_gradient_bytes_K=self.holdings.table.trained_R[at_K],
            together_gradient_bytes_K=held.together_K,
            imbalance_K=imbalance_K,
            sent_K=sent_K,
            forward_away_RK=away[0],
            backward_away_RK=away[1],
            variant_K=candidates.variant_K,
        )

    def needs(self, slot: StageSlot, candidates: StageCandidates) -> "StageNeeds":
        """Everything that the candidates' memory is made of, whatever the number of microbatches in flight.

        Of the slot only rows, degrees, batch and whether there are several stages and microbatches matter.
        """
        context, degree = slot.context_parallel_degree, slot.shard_degree
        costs, held = self.costs(slot.rows, context), self.holdings.of(candidates)
        shares = self.shares(candidates, degree)
        runs = self.runs(candidates, held, degree, shares)
        owned_K, gradients_K, parameters_K = _owned(candidates, held, shares)
        factor = self.spec.optimizer.gradient_bytes_per_parameter_byte
        bytes_, plain_K = self._passes(slot, candidates, runs, held), self.plain(slot, candidates)
        if plain_K is not None:
            bytes_["forward_K"] += held.trained_K * plain_K
            plain_first_K = held.trained_K + held.reused_K + bytes_["backward_K"]
            bytes_["first_backward_K"] = np.where(plain_K, plain_first_K, bytes_["first_backward_K"])
        filled_K = bytes_.pop("filled_K")
        return StageNeeds(
            always={
                "parameter_bytes": parameters_K,
                "buffer_bytes": float(self.spec.buffer_bytes),
                "optimizer_bytes": self.spec.optimizer.state_bytes_per_parameter_byte * owned_K,
                "batch_bytes": self.batch_bytes(slot),
            },
            gradients_K=factor * gradients_K,
            reused_K=factor * held.reused_K,
            # Context-parallel ranks lay out in stripes what arrives as one run of tokens.
            entering_K=costs.boundary_by_cut[candidates.start_K]
            * (1 + (context > 1 and stripes_of(self.spec.sequence_length or 1, context) > 1)),
            leaving_K=costs.gradient_boundary_by_cut[candidates.end_K],
            returned_K=costs.gradient_boundary_by_cut[candidates.start_K],
            together_K=factor * held.together_K,
            host_state_K=np.zeros(len(candidates)),
            host_microbatch_K=np.zeros(len(candidates)),
            update=tuple(self._update(slot, filled_K, held, owned_K, gradients_K, candidates)),
            **bytes_,
        )

    def batch_bytes(self, slot: StageSlot) -> float:
        """Bytes of the batches that a rank of a slot has, its own and those that it computes on."""
        return slot.batches_held * self.costs(slot.batch_rows, slot.context_parallel_degree).batch_bytes

    def plain(self, slot: StageSlot, candidates: StageCandidates) -> BoolArray | None:
        """Which candidates torch's ``DistributedDataParallel`` runs, as they are what it does; ``None`` if none can be.

        Its buckets are made with the module and hold all gradients from one step to the next.
        """
        if self._is_variant or self.spec.master_weights or slot.num_stages > 1 or slot.num_microbatches > 1:
            return None
        keeps_K = slot.method.keeps_all(candidates.checkpointed_K)
        plain_K: BoolArray = (candidates.zero_stage_K == 0) & keeps_K & (slot.context_parallel_degree == 1)
        return plain_K

    def _passes(
        self, slot: StageSlot, candidates: StageCandidates, runs: StageRuns, held: HeldBytes
    ) -> dict[str, FloatArray]:
        """Bytes of passes by their names in :class:`StageNeeds`, and of the filling of gradient buckets."""
        names = ("forward", "first_backward", "backward", "input_backward", "weight_backward")
        rest = ("pending", "saved", "handed", "waiting", "filled")
        found = {f"{name}_K": np.zeros(len(candidates)) for name in (*names, *rest)}
        # Below ZeRO-2 passes need the same, and above it but for what the runs say.
        shards_K = candidates.zero_stage_K >= ZeroStage.GRADIENTS
        for zero_stage, index_J in ((0, _places(~shards_K)), (int(ZeroStage.GRADIENTS), _places(shards_K))):
            if index_J is None:
                continue
            is_split, context = slot.schedule == "zb-h1", slot.context_parallel_degree
            loads = self.loads(slot.rows, zero_stage, slot.shard_degree, context, is_split=is_split)
            passes = PassBytes(loads, runs.take(index_J))
            handed_J = passes.handed()
            backward_J = passes.backward_rows().max(axis=0, initial=0.0)
            terms = {
                "forward": passes.forward_rows().max(axis=0, initial=0.0),
                "first_backward": passes.first_backward_rows().max(axis=0, initial=0.0),
                "backward": backward_J,
                # Only zero bubble makes gradients of inputs by themselves.
                "input_backward": passes.input_backward() if is_split else backward_J,
                "weight_backward": passes.weight_backward(held.largest_K[index_J]),
                "pending": passes.pending(),
                "saved": passes.saved_K - handed_J,
                "handed": handed_J,
                "waiting": passes.waiting(),
            }
            if slot.shard_degree > 1 and not zero_stage:
                terms["filled"] = passes.bucket(held.bucket_K[index_J], progressive=slot.num_microbatches == 1)
            for name, term_J in terms.items():
                found[f"{name}_K"][index_J] = term_J
        return found

    def peaks(self, slot: StageSlot, candidates: StageCandidates) -> FloatArray:
        """Peak bytes of each candidate."""
        return self.needs(slot, candidates).peaks(moments_of(slot))

    def _update(
        self,
        slot: StageSlot,
        filled_K: FloatArray,
        held: HeldBytes,
        owned_K: FloatArray,
        gradients_K: FloatArray,
        candidates: StageCandidates,
    ) -> list[tuple[str, Mapping[str, Bytes]]]:
        """What comes after gradients are complete: reduction, optimizer step, gathering."""
        optimizer, zero_K = self.spec.optimizer, candidates.zero_stage_K
        step_K = (
            optimizer.step_peak_bytes_per_parameter_byte * owned_K
            + optimizer.step_peak_bytes_per_largest * np.minimum(held.largest_K, owned_K)
        )
        factor = optimizer.gradient_bytes_per_parameter_byte
        updated_K = factor * owned_K
        result: list[tuple[str, Mapping[str, Bytes]]] = [
            ("optimizer step", {"gradient_bytes": updated_K, "working_bytes": step_K})
        ]
        if slot.num_stages > 1:
            tied = {"gradient_bytes": factor * gradients_K, "working_bytes": factor * held.shared_K}
            result.append(("tied gradients", tied))
        if slot.shard_degree > 1:
            plain_K, reduces_K = self.plain(slot, candidates), zero_K < ZeroStage.GRADIENTS
            gathers_K = (zero_K >= ZeroStage.OPTIMIZER) & (zero_K < ZeroStage.PARAMETERS)
            even_K = gathers_K & self.holdings.is_even
            if plain_K is not None:
                filled_K = np.where(plain_K, held.trained_K, filled_K)
            # What was received is there until its gradient leaves: a sum, and what is being added to it, beside the
            # gradient of the microbatch before.
            costs = self.costs(slot.rows, slot.context_parallel_degree)
            sent_K = costs.boundary_by_cut[candidates.start_K] + 3 * costs.gradient_boundary_by_cut[candidates.start_K]
            filled = {"transfer_bytes": sent_K * reduces_K, "working_bytes": filled_K * reduces_K}
            flat_K = np.where(even_K & ~reduces_K, held.unit_K, held.bucket_K)
            gathered_K = np.minimum(BUCKETS_IN_FLIGHT * flat_K, held.trained_K) * gathers_K
            if factor == 1.0:
                # This rank's pieces lie beside the buffers that they come from, and one beside that which it goes to.
                filled["gradient_bytes"] = owned_K * (even_K & reduces_K)
                gathered_K = gathered_K + even_K * np.minimum(flat_K, held.trained_K) / slot.shard_degree
            result.append(("gradient reduction", filled))
            result.append(("parameter gathering", {"gradient_bytes": updated_K, "working_bytes": gathered_K}))
        return result


def _owned(
    candidates: StageCandidates, held: HeldBytes, shares: SharedOut | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes of the parameters that a rank updates, of the gradients and of the parameters that it keeps."""
    if shares is None:
        return held.trained_K, held.trained_K, held.all_K
    zero_K = candidates.zero_stage_K
    owned_K = np.where(zero_K >= ZeroStage.OPTIMIZER, shares.trained_K, held.trained_K)
    gradients_K = np.where(zero_K >= ZeroStage.GRADIENTS, shares.trained_K, held.trained_K)
    return owned_K, gradients_K, np.where(zero_K >= ZeroStage.PARAMETERS, shares.every_K, held.all_K)


def _places(chosen_K: BoolArray) -> IntArray | slice | None:
    """Where some candidates are, as a slice if nothing else is between; ``None`` if there are none."""
    index_J = np.flatnonzero(chosen_K)
    if not len(index_J):
        return None
    first, last = int(index_J[0]), int(index_J[-1])
    return slice(first, last + 1) if last - first + 1 == len(index_J) else index_J
