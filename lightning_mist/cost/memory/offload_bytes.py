"""Memory of stages that keep a part of their state in host memory.

What is where, and when. *Units* are the head, every layer and the tail; a parameter that several units use belongs to
the first of them. Everything moves unit by unit, one unit ahead of its use, through two buffers of each kind.

* *What is offloaded of parameters, gradients and optimizer state*: whole parameters. In each unit, from the largest to
  the smallest (the earlier first among equals), a parameter is offloaded if the unit's offloaded bytes then still are
  at most ``ratio`` of the unit's bytes. So a unit of one parameter is offloaded at ratio 1 only. Where ZeRO
  gives ranks even pieces each offloads its piece of that; else of what it owns what is to be offloaded.
* *Parameters* that are offloaded are on the device from one unit ahead of their unit's forward until it has run, and
  again around its backward. Under ZeRO-3 who owns them, or a piece, has that in host memory, and fetches it to give it
  out.
* *Gradients* that are offloaded are fetched beside their unit's backward, added to, and written back behind it.
* *Optimizer state*: with any of it, of parameters or of gradients offloaded the step runs unit by unit; a unit's
  offloaded state is fetched while the unit before is stepped, and written back while the next one is. As the step is
  left to the next batch's forward, a third unit's offloaded parameters may be there: those of the unit that computes
  next.
* *Gradients* have the type in which they are added up, in buffers and in host memory too.
* *Buffers*: for each of these kinds two, each as large as the largest that one rank offloads of one unit. They exist
  from setup to the end, so that nothing is allocated while the stage runs. State of the head and the tail, which may
  have a vocabulary, passes through layers' buffers in parts where every rank updates all of it and the optimizer is
  known to treat every entry by itself.
* *Activations*: of every tensor that a layer keeps for backward, the last ``ratio`` of its elements, and *checkpoints*,
  of a layer that will be recomputed what it hands on: of the last of them no more than the next layer, which keeps it,
  moves of its own. Head and tail keep theirs, but what the head hands on leaves with what the first layer keeps. What a
  stage's last layer hands on stays until it has been sent, or is the tail's. Less than :data:`LEAST_BYTES` of a layer
  are none. The copies of a layer have ended when the forward of the next layer or of the tail has; a stage waits for
  those of its last layer before it begins something else. In backward a layer's tensors are whole when it begins, and
  those of the layer below arrive meanwhile, for the first time during the backward of the tail.
* *Host memory*, pinned, of each device: what it offloads of every kind; of activations for every microbatch in flight.

A ratio that moves nothing is no ratio: every figure is that of a stage which offloads nothing.

Array axes
    K  candidates; of combinations stages with pairs of ratios, of every stage all, those of what layers keep fastest
    S  stages
    C  ratios of parameters, of gradients, of optimizer state, of what layers keep, in this order
    P  parameters
    R  regions
    J  variants: distinct ratios of what layers keep and of gradients
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lightning_mist.cost.inputs import (
    BoolArray,
    FloatArray,
    IntArray,
    OffloadCandidates,
    RegionCosts,
    StageCandidates,
    StageSlot,
    distinct_rows,
)
from lightning_mist.cost.memory.held_parameters import BUCKETS_IN_FLIGHT, VariantHoldings
from lightning_mist.cost.memory.memory_model import Adjustment, ResidentMemory
from lightning_mist.cost.memory.moments import Moments, in_flight
from lightning_mist.cost.memory.offload_shares import Shares
from lightning_mist.cost.memory.pass_bytes import PassBytes
from lightning_mist.cost.memory.stage_bytes import Bytes, PeakParts, StageNeeds, Updates, most_of
from lightning_mist.plan import ZeroStage

BUFFERS = 2
"""Buffers of each kind: what is used, and what is fetched ahead or written back."""

LEAST_BYTES = 64
"""Bytes of a layer's activations that are moved at least: what is moved begins in a cache line of its own. So a ratio
of which no tensor has a whole element moves nothing, as in the runtime."""


def offloaded_activations(costs: RegionCosts, kept_ratios: FloatArray) -> RegionCosts:
    """Costs of regions whose layers have offloaded a share of what they keep, as the module's docstring says.

    Args:
        kept_ratios: The share in each of several variants, of layers that are not recomputed and of those that are;
            what is changed has a row for each.
    """
    changed: dict[str, Any] = {}
    below = list[FloatArray]()
    for kind, way, ratio_J in (("", "", kept_ratios[:, 0]), ("checkpointed_", "recompute_", kept_ratios[:, 1])):
        kept_R, handed_R = getattr(costs, f"{kind}saved_R"), getattr(costs, f"{kind}handed_R")
        away_JR = _moved(ratio_J[:, None], np.concatenate([handed_R[:1], kept_R[1:-1], [0.0]]))
        handed_JR = np.where(away_JR > 0, ratio_J[:, None] * handed_R, 0.0)
        # What the last layer hands to the tail is the tail's.
        away_JR[:, -2] -= handed_JR[:, -2]
        changed[f"{kind}saved_R"], changed[f"{kind}handed_R"] = kept_R - away_JR, handed_R - handed_JR
        for name in (f"{way}backward_peak_R", f"first_{way}backward_peak_R"):
            changed[name] = getattr(costs, name) + away_JR
        # What a layer is given leaves, and comes, with what it keeps itself: the layer below has what that is given.
        below.append(_behind(away_JR, 1) + _behind(handed_JR, 2))
    return replace(costs, **changed, below=(below[0], below[1]))


def _moved(ratio: FloatArray, kept: FloatArray) -> FloatArray:
    """Bytes that a ratio moves of what a layer keeps."""
    moved: FloatArray = ratio * kept
    return np.where(moved < LEAST_BYTES, 0.0, moved)


def _behind(values_JR: FloatArray, count: int) -> FloatArray:
    """Of each region the value of one so many places in front of it."""
    return np.pad(values_JR[:, :-count], ((0, 0), (count, 0)))


def resident_part(model: ResidentMemory, ratios_J: FloatArray) -> ResidentMemory:
    """The networks of what resident on the device: gradients of offloaded parameters are made and are gone."""

    def build() -> tuple[VariantHoldings, Adjustment]:
        network_ratios, network_by_variant = np.unique(ratios_J[:, -1], return_inverse=True)
        networks = [model.parted(0.0), *(model.parted(float(ratio)) for ratio in network_ratios)]
        holdings = VariantHoldings(networks, 1 + network_by_variant.reshape(-1))
        return holdings, partial(offloaded_activations, kept_ratios=ratios_J[:, :-1])

    return model.variants(tuple(map(tuple, ratios_J.tolist())), build)


def kept_pairs(candidates: StageCandidates, ratios_K: FloatArray) -> FloatArray:
    """Ratios of what layers keep and of gradients; where all layers keep alike both of the first are that of these."""
    checkpointed_K, ratios_K = candidates.checkpointed_K, ratios_K.copy()
    np.copyto(ratios_K[:, 0], ratios_K[:, 1], where=checkpointed_K == candidates.end_K - candidates.start_K)
    np.copyto(ratios_K[:, 1], ratios_K[:, 0], where=checkpointed_K == 0)
    return ratios_K


def staying_bytes(
    model: ResidentMemory, slot: StageSlot, candidates: StageCandidates, ratios_K: FloatArray
) -> FloatArray:
    """Bytes of what the last recomputed layer hands on that stay, as the next layer, which keeps it, moves less."""
    costs = model.costs(slot.rows, slot.context_parallel_degree)
    kept_K = costs.checkpointed_saved_R[candidates.start_K + candidates.checkpointed_K]
    stays_K: FloatArray = np.maximum(_moved(ratios_K[:, 1], kept_K) - _moved(ratios_K[:, 0], kept_K), 0.0)
    return stays_K


def offloaded_needs(
    model: ResidentMemory, slot: StageSlot, plain: StageCandidates, offload: OffloadCandidates
) -> StageNeeds:
    """What the memory of candidates is made of that offload something beyond what they are without."""
    if not len(plain):
        return model.needs(slot, plain)
    ratios_J, pair_K = distinct_rows(*offload.kept_ratios.T, offload.gradients_K)
    whole, degree = model.needs(slot, plain), slot.shard_degree

    def shares(ratio_K: FloatArray, since: ZeroStage, *, trained: bool = True) -> Shares:
        """Those of a kind of state that is shared out from a ZeRO stage on."""
        return model.states.of(plain, ratio_K, degree, plain.zero_stage_K >= since, trained=trained)

    offloaded = (shares(offload.gradients_K, ZeroStage.GRADIENTS), shares(offload.gradients_K, ZeroStage.OPTIMIZER))
    resident = resident_needs(model, slot, plain, whole, (ratios_J, pair_K), offloaded[0])
    parameters = shares(offload.parameters_K, ZeroStage.PARAMETERS, trained=False)
    optimizer = shares(offload.optimizer_K, ZeroStage.OPTIMIZER)
    largest_K = model.holdings.of(plain).largest_K
    buffers = parameter_buffers(model, slot, plain)
    found = _with_states(model, buffers, resident, parameters, offloaded[1], optimizer, largest_K)
    found = replace(found, update=unjoined(model, slot, plain, found.update, offload.is_updated_by_units_K))
    spec, in_host = model.spec.optimizer, offloaded[0] if adds_in_host(slot) else offloaded[1]
    sums_K = spec.gradient_bytes_per_parameter_byte * in_host.offloaded_K
    state_K = spec.state_bytes_per_parameter_byte * optimizer.offloaded_K
    found = replace(
        found,
        host_state_K=parameters.offloaded_K + sums_K + state_K,
        host_microbatch_K=whole.saved_K - found.saved_K,
    )
    if model.plain(slot, plain) is None:
        return found
    moved_K = parameters.offloaded_K + offloaded[1].offloaded_K + optimizer.offloaded_K
    return _plain_unless(found, whole, moved_K + found.host_microbatch_K > 0)


def _plain_unless(found: StageNeeds, whole: StageNeeds, moves_K: BoolArray) -> StageNeeds:
    """Needs of stages that torch's own module runs unless they move something."""
    update = tuple(
        (name, {term: np.where(moves_K, value, terms[term]) for term, value in changed.items()})
        for (name, changed), (_, terms) in zip(found.update, whole.update, strict=True)
    )
    forward_K = np.where(moves_K, found.forward_K, whole.forward_K)
    first_K = np.where(moves_K, found.first_backward_K, whole.first_backward_K)
    return replace(found, forward_K=forward_K, first_backward_K=first_K, update=update)


def resident_needs(
    model: ResidentMemory,
    slot: StageSlot,
    plain: StageCandidates,
    whole: StageNeeds,
    pairs: tuple[FloatArray, IntArray],
    gradients: Shares,
) -> StageNeeds:
    """Needs of candidates that move activations and gradients only, but without the optimizer's temporaries.

    Args:
        pairs: Distinct ratios of what layers keep and of gradients, the last; and which of them each candidate has.
        gradients: Shares of gradients, shared out from ZeRO-2 on.
    """
    ratios_J, pair_K = pairs
    stays_K: FloatArray | float = 0.0
    if (ratios_J[:, 0] != ratios_J[:, 1]).any():
        ratios_K = kept_pairs(plain, ratios_J[pair_K])
        stays_K = staying_bytes(model, slot, plain, ratios_K)
        ratios_J, pair_K = distinct_rows(*ratios_K.T)
    found = resident_part(model, ratios_J).needs(slot, replace(plain, variant_K=pair_K))
    # All updated parameters are given out, wherever their gradients were.
    gathered = {"working_bytes": dict(whole.update).get("parameter gathering", {}).get("working_bytes", 0.0)}
    factor = model.spec.optimizer.gradient_bytes_per_parameter_byte
    # What is added to a buffer: a gradient, or the piece that has arrived of a unit's.
    are_pieces_K = (plain.zero_stage_K >= ZeroStage.GRADIENTS) & (model.holdings.is_even and slot.shard_degree > 1)
    added_K = np.where(are_pieces_K, gradients.largest_K, gradients.single_K)
    buffers_K = factor * (BUFFERS * gradients.largest_K + added_K)
    if factor > 1 and slot.shard_degree > 1:
        # Sums that ranks reduce travel in the type that is computed in: a unit's, while the next runs its backward.
        buffers_K = buffers_K + np.where(plain.zero_stage_K < ZeroStage.GRADIENTS, gradients.largest_K, 0.0)
    reduced = {"working_bytes": dict(found.update).get("gradient reduction", {}).get("working_bytes", 0.0) + stays_K}
    changed = {"parameter gathering": gathered, "gradient reduction": reduced}
    return replace(
        found,
        always={**whole.always, "offload_bytes": buffers_K},
        saved_K=found.saved_K + stays_K,
        handed_K=whole.handed_K,
        forward_K=found.forward_K + stays_K,
        first_backward_K=found.first_backward_K + stays_K,
        backward_K=found.backward_K + stays_K,
        input_backward_K=found.input_backward_K + stays_K,
        weight_backward_K=whole.weight_backward_K,
        update=tuple((name, {**terms, **changed.get(name, {})}) for name, terms in found.update),
    )


def unjoined(
    model: ResidentMemory, slot: StageSlot, plain: StageCandidates, update: Updates, by_units: BoolArray | bool = True
) -> Updates:
    """What comes after the last backward where ZeRO-1 has even pieces of units, which may be larger than buckets."""
    held, degree = model.holdings.of(plain), slot.shard_degree
    is_even_K = (plain.zero_stage_K == ZeroStage.OPTIMIZER) & (model.holdings.is_even and degree > 1) & by_units
    more_K = np.maximum(held.unit_K - held.bucket_K, 0.0) * is_even_K
    buffers = {"gradient reduction": 1, "parameter gathering": BUCKETS_IN_FLIGHT + 1 / degree}
    return tuple(
        (name, {**terms, "working_bytes": terms["working_bytes"] + buffers.get(name, 0) * more_K})
        for name, terms in update
    )


def parameter_buffers(model: ResidentMemory, slot: StageSlot, plain: StageCandidates) -> tuple[FloatArray, FloatArray]:
    """How many buffers of a unit's offloaded parameters there are in passes, and how many more in the update.

    In passes pieces arrive where units are gathered, whose bytes are counted anyhow.
    """
    shards_K = plain.zero_stage_K >= ZeroStage.PARAMETERS
    in_place_K = shards_K & (model.holdings.is_even and slot.shard_degree > 1)
    return np.where(in_place_K, 0.0, BUFFERS), np.where(in_place_K, BUFFERS + 1.0, 1.0)


def _with_states(
    model: ResidentMemory,
    buffers: tuple[FloatArray, FloatArray],
    resident: StageNeeds,
    parameters: Shares,
    gradients: Shares,
    optimizer: Shares,
    largest_K: FloatArray,
) -> StageNeeds:
    """Needs with what resident of parameters and state, and their buffers."""
    spec = model.spec.optimizer
    state, factor = spec.state_bytes_per_parameter_byte, spec.gradient_bytes_per_parameter_byte
    always: Mapping[str, Bytes] = {
        **resident.always,
        "parameter_bytes": parameters.resident_K,
        "optimizer_bytes": state * optimizer.resident_K,
        "offload_bytes": resident.always["offload_bytes"]
        + buffers[0] * parameters.largest_K
        + BUFFERS * state * optimizer.passing(in_parts=spec.is_entrywise),
    }
    by_units_K = (parameters.offloaded_K > 0) | (gradients.offloaded_K > 0)
    step_K = step_bytes(model, optimizer, largest_K, by_units_K) - factor * gradients.single_K
    step_K = step_K + buffers[1] * parameters.largest_K
    changed = {"optimizer step": {"working_bytes": step_K}}
    update = tuple((name, {**terms, **changed.get(name, {})}) for name, terms in resident.update)
    return replace(resident, always=always, update=update)


def step_bytes(
    model: ResidentMemory, optimizer: Shares, largest_K: FloatArray, by_units_K: BoolArray | bool
) -> FloatArray:
    """Temporaries of the optimizer's step: of the largest unit where it runs unit by unit, else of all parameters."""
    spec = model.spec.optimizer
    all_K = optimizer.resident_K + optimizer.offloaded_K
    stepped_K = np.where((optimizer.offloaded_K > 0) | by_units_K, optimizer.unit_K, all_K)
    step_K: FloatArray = (
        spec.step_peak_bytes_per_parameter_byte * stepped_K
        + spec.step_peak_bytes_per_largest * np.minimum(largest_K, stepped_K)
    )
    return step_K


def adds_in_host(slot: StageSlot) -> bool:
    """Whether offloaded gradients add up in host memory, also those that other ranks will have under ZeRO-1."""
    return slot.num_microbatches > 1


class MemoryModel(ResidentMemory):
    """Peak memory of stages of one network, with what they offload."""

    def needs(self, slot: StageSlot, candidates: StageCandidates) -> StageNeeds:
        """Everything that the candidates' memory is made of, as of :class:`ResidentMemory`."""
        if candidates.offload is None:
            return super().needs(slot, candidates)
        return offloaded_needs(self, slot, replace(candidates, offload=None), candidates.offload)

    def of_units(self, slot: StageSlot, candidates: StageCandidates) -> dict[str, FloatArray]:
        """What passes of a single stage need in each of its units: head, layers and tail.

        Returns:
            By what is computed, ``"forward"``, ``"first backward"`` and ``"backward"``, what is there of the microbatch
            at hand, and of what is made for it, beside what the units need while they run (what earlier units left),
            and the most while they run; axes for the two and for the units in the order of forward.
        """
        some, stays = candidates, 0.0
        part: ResidentMemory = self
        if (offload := candidates.offload) is not None:
            ratios_J = kept_pairs(candidates, np.column_stack([offload.kept_ratios, offload.gradients_K]))
            stays = float(staying_bytes(self, slot, candidates, ratios_J)[0])
            part = resident_part(self, ratios_J)
            some = replace(candidates, offload=None, variant_K=np.zeros(1, dtype=np.int64))
        degree, zero_stage = slot.shard_degree, int(some.zero_stage_K[0])
        runs = part.runs(some, part.holdings.of(some), degree, part.shares(some, degree))
        loads = part.loads(slot.rows, zero_stage, degree, slot.context_parallel_degree)
        passes = PassBytes(loads, runs, by_unit=True)
        rows = passes.forward_rows, passes.first_backward_rows, passes.backward_rows
        names = ("forward", "first backward", "backward")
        each = (np.stack([of(temporaries=is_all)[:, 0] for is_all in (False, True)]) + stays for of in rows)
        return dict(zip(names, each, strict=True))


# What the peaks of stages are made of for every combination of ratios, from each kind of state by itself.
#
# At no moment of a batch do two kinds of state depend on each other but activations and gradients, which the same
# working sets count. So a stage is asked about once for every pair of their ratios, and once for every ratio of
# parameters and of optimizer state, and the peak of a combination is
#
#   parameters + optimizer state + max(what a pair of ratios leaves, gradients that stay + the optimizer's temporaries)
#
# each with its buffers; of the temporaries it matters only whether anything else that the step needs is offloaded,
# and beside them are the offloaded parameters of a third unit. All of it is from the functions that needs are made by.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The ratios of each kind of state, ascending; of what layers keep for backward those of all kinds together."""

    parameters: tuple[float, ...]
    gradients: tuple[float, ...]
    optimizer: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many of each there are."""
        return len(self.parameters), len(self.gradients), len(self.optimizer), len(self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParts:
    """What peaks of stages are made of, whatever slots they are of.

    Attributes:
        resident: What pairs of ratios leave on the device, buffers of gradients and all that is never offloaded
            included.
        beside_SC: What of it is there in the optimizer's step.
        parameters_SC: Parameters that stay, and buffers of others.
        step_SC: The optimizer's temporaries where neither parameters nor gradients are offloaded.
        unit_SC: The same where some are: of one unit.
        third_SC: Offloaded parameters that are there in the step only.
        whole: Those of stages that torch's own module may run, where nothing is moved.
        unjoined_SCC: What comes after the last backward where ZeRO-1 has even pieces unit by unit, which stages have
            that move more than activations.
    """

    resident: PeakParts
    beside_SC: FloatArray
    parameters_SC: FloatArray
    optimizer_SC: FloatArray
    step_SC: FloatArray
    unit_SC: FloatArray
    third_SC: FloatArray
    host_parameters_SC: FloatArray
    host_gradients_SC: FloatArray
    host_optimizer_SC: FloatArray
    host_activations_K: FloatArray
    whole: PeakParts | None
    unjoined_SCC: FloatArray

    @classmethod
    def of(cls, model: ResidentMemory, slot: StageSlot, candidates: StageCandidates, ratios: Ratios) -> "OffloadParts":
        """Those of the stages of one slot, which come without ratios."""
        count, spec = len(candidates), model.spec.optimizer
        state, factor = spec.state_bytes_per_parameter_byte, spec.gradient_bytes_per_parameter_byte
        zero_S, ranks = candidates.zero_stage_K, slot.shard_degree

        def shares(values: tuple[float, ...], since: ZeroStage, *, trained: bool = True) -> Shares:
            return model.states.of_ratios(candidates, values, ranks, zero_S >= since, trained=trained)

        parameters = shares(ratios.parameters, ZeroStage.PARAMETERS, trained=False)
        gradients = shares(ratios.gradients, ZeroStage.GRADIENTS)
        # Gradients whose parameters a rank updates.
        owned = shares(ratios.gradients, ZeroStage.OPTIMIZER)
        optimizer = owned if ratios.optimizer == ratios.gradients else shares(ratios.optimizer, ZeroStage.OPTIMIZER)
        whole = model.needs(slot, candidates)
        ratios_J = np.array([(*kept, g) for g in ratios.gradients for kept in ratios.kept])
        of_K, pair_K = np.divmod(np.arange(count * len(ratios_J)), len(ratios_J))
        every = len(ratios.kept)
        # Of the gradients' shares of all stages, which have no axis for activations.
        place_K = np.arange(len(of_K)) // every
        of_pairs = gradients.take(place_K)
        plain = candidates.take(of_K)
        resident = resident_needs(model, slot, plain, whole.take(of_K), (ratios_J, pair_K), of_pairs)
        apart = ("parameter_bytes", "optimizer_bytes")
        always = {name: value for name, value in resident.always.items() if name not in apart}
        resident = replace(resident, always=always)
        buffers = parameter_buffers(model, slot, candidates)
        largest_S1 = model.holdings.of(candidates).largest_K[:, None]
        parts, shape = PeakParts.of(resident), (count, len(ratios.gradients), every)
        unjoined_K = most_of(unjoined(model, slot, plain, resident.update))
        return cls(
            resident=parts,
            beside_SC=factor * (owned.resident_K - owned.single_K) + parts.always_K[::every].reshape(count, -1),
            parameters_SC=parameters.resident_K + buffers[0][:, None] * parameters.largest_K,
            optimizer_SC=state * (optimizer.resident_K + BUFFERS * optimizer.passing(in_parts=spec.is_entrywise)),
            step_SC=step_bytes(model, optimizer, largest_S1, False),
            unit_SC=step_bytes(model, optimizer, largest_S1, True),
            third_SC=buffers[1][:, None] * parameters.largest_K,
            host_parameters_SC=parameters.offloaded_K,
            host_gradients_SC=factor * (gradients if adds_in_host(slot) else owned).offloaded_K,
            host_optimizer_SC=state * optimizer.offloaded_K,
            host_activations_K=whole.saved_K[of_K] - resident.saved_K,
            whole=None if model.plain(slot, candidates) is None else PeakParts.of(whole),
            unjoined_SCC=(parts.always_K + unjoined_K).reshape(shape),
        )

    def __len__(self) -> int:
        """Number of stages."""
        return len(self.beside_SC)

    def take(self, index_J: IntArray) -> "OffloadParts":
        """Those of the stages at some indices."""
        pairs = len(self.host_activations_K) // max(1, len(self))
        index_K = (index_J[:, None] * pairs + np.arange(pairs)).reshape(-1)
        arrays = {name: getattr(self, name)[index_J] for name in self.__slots__ if "_S" in name}
        return OffloadParts(
            resident=self.resident.take(index_K),
            host_activations_K=self.host_activations_K[index_K],
            whole=self.whole and self.whole.take(index_J),
            **arrays,
        )

    def peaks(self, moments: Moments) -> FloatArray:
        """Peak bytes of every stage with every combination of ratios; axes ``SCCCC``."""
        pairs_SCC = self.resident.peaks(moments).reshape(*self.beside_SC.shape, -1)
        offloads_SCC = (self.host_parameters_SC[:, :, None] > 0) | (self.host_gradients_SC[:, None] > 0)
        step_SCCC = np.where(offloads_SCC[..., None], self.unit_SC[:, None, None], self.step_SC[:, None, None])
        step_SCCC += (self.third_SC[:, :, None] + self.beside_SC[:, None])[..., None]
        rest_SCCCC = np.maximum(pairs_SCC[:, None, :, None], step_SCCC[..., None])
        joined_SC = rest_SCCCC[:, 0, 0, 0].copy()
        np.maximum(rest_SCCCC, self.unjoined_SCC[:, None, :, None], out=rest_SCCCC)
        # Ratios ascend from 0.
        rest_SCCCC[:, 0, 0, 0] = joined_SC
        held_SCC = self.parameters_SC[:, :, None] + self.optimizer_SC[:, None]
        peak_SCCCC: FloatArray = rest_SCCCC + held_SCC[:, :, None, :, None]
        if self.whole is not None:
            whole_S = self.whole.peaks(moments)
            peak_SCCCC = np.where(self.host_bytes(moments) > 0, peak_SCCCC, whole_S[:, None, None, None, None])
        return peak_SCCCC

    def host_bytes(self, moments: Moments) -> FloatArray:
        """Pinned host memory of the same."""
        offloaded_SCC = in_flight(moments) * self.host_activations_K.reshape(*self.beside_SC.shape, -1)
        states_SCC = self.host_gradients_SC[:, :, None] + self.host_optimizer_SC[:, None, :]
        rest_SCCC = offloaded_SCC[:, :, None, :] + states_SCC[..., None]
        return self.host_parameters_SC[:, :, None, None, None] + rest_SCCC[:, None]
