"""Memory of stages that keep a part of their state in host memory.

What is where, and when. *Units* are the head, every layer and the tail; a parameter that several units use belongs to
the first of them. Everything moves unit by unit, one unit ahead of its use, through two buffers of each kind.

* *What is moved of parameters, gradients and optimizer state*: whole parameters. In each unit, from the largest to the
  smallest (the earlier first among equals), a parameter is moved if the unit's moved bytes then still are at most
  ``ratio`` of the unit's bytes. So a unit of one parameter is moved at ratio 1 only. Which parameters a rank owns under
  ZeRO is not changed by that: of what it owns, it moves what is to be moved.
* *Parameters* that are moved are on the device from one unit ahead of their unit's forward until it has run, and again
  around its backward. Under ZeRO-3 it is their owner that has them in host memory, and fetches them to give them out.
* *Gradients* that are moved are fetched ahead of their unit's backward, added to, and written back behind it.
* *Optimizer state*: with any of it moved the step runs unit by unit; a unit's moved state is fetched while the unit
  before is stepped, and written back while the next one is.
* *Buffers*: for each of these kinds two, each as large as the largest that one rank moves of one unit. They exist from
  setup to the end, so that nothing is allocated while the stage runs.
* *Activations*: of every tensor that a layer keeps for backward, the last ``ratio`` of its elements, of a layer that
  will be recomputed what it hands on; head and tail keep theirs. The copies of a layer have ended when the forward of
  the next layer or of the tail has; a stage waits for those of its last layer before it begins something else. In
  backward a layer's tensors are whole when it begins, and those of the layer below arrive meanwhile, for the first time
  during the backward of the tail.
* *Host memory*, pinned, of each device: what it moves of every kind; of activations for every microbatch in flight.

Array axes
    K  candidates
    P  parameters
    R  regions
    J  distinct questions
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from lightning_mist.cost.candidates import OffloadCandidates, StageCandidates, StageSlot
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.distinct import distinct_rows
from lightning_mist.cost.held import Holdings
from lightning_mist.cost.needs import Bytes, StageNeeds
from lightning_mist.cost.phases import Phase
from lightning_mist.cost.regions import ParameterTable, RegionCosts, covered
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ZeroStage
from lightning_mist.plan.sharding import assign_owners

BUFFERS = 2
"""Buffers of each kind: what is used, and what is fetched ahead or written back."""

Adjustment: TypeAlias = Callable[[RegionCosts], RegionCosts]
"""What changes about the costs of regions."""


def unadjusted(costs: RegionCosts) -> RegionCosts:
    """The costs as they are."""
    return costs


def moved_parameters(table: ParameterTable, ratio: float, *, trained: bool) -> BoolArray:
    """Which parameters are moved; axis ``P``.

    Args:
        table: Bytes and uses of all parameters.
        ratio: Share of each unit's bytes that may be moved.
        trained: Whether only trained parameters count (for gradients and optimizer state).
    """
    bytes_P = table.trainable_P if trained else table.bytes_P
    unit_P = np.diff(table.uses_PR, axis=1).argmax(axis=1)
    moved_P = np.zeros(len(bytes_P), dtype=bool)
    if ratio == 0.0:
        return moved_P
    for unit in np.unique(unit_P):
        members = np.flatnonzero((unit_P == unit) & (bytes_P > 0))
        # Bytes are whole numbers: one part in 10^12 is less than one of them, and more than rounding.
        room = ratio * bytes_P[members].sum() * (1 + 1e-12)
        for index in members[np.argsort(-bytes_P[members], kind="stable")]:
            if bytes_P[index] <= room:
                moved_P[index] = True
                room -= bytes_P[index]
    return moved_P


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a stage's ranks have of one kind of state, in bytes of parameters; the most of any rank.

    Attributes:
        resident_K: What stays on the device.
        moved_K: What is in host memory.
        largest_K: The largest moved part of one unit: the size of a buffer.
        unit_K: The largest unit, moved or not.
    """

    resident_K: FloatArray
    moved_K: FloatArray
    largest_K: FloatArray
    unit_K: FloatArray


class StateShares:
    """Shares of stages of one network; keeps what it has computed.

    Args:
        holdings: The network's parameters.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._moved: dict[tuple[float, bool], BoolArray] = {}
        self._found: dict[tuple[float, ...], tuple[float, ...]] = {}

    def moved(self, ratio: float, *, trained: bool) -> BoolArray:
        """As :func:`moved_parameters`."""
        key = (ratio, trained)
        if key not in self._moved:
            self._moved[key] = moved_parameters(self._holdings.table, ratio, trained=trained)
        return self._moved[key]

    def of(
        self, candidates: StageCandidates, ratio_K: FloatArray, ranks: int, shards_K: BoolArray, *, trained: bool
    ) -> Shares:
        """The shares of each candidate.

        Args:
            candidates: The stages.
            ratio_K: How much is moved.
            ranks: Ranks with the same parameters.
            shards_K: Whether they own a part each; otherwise every rank has all.
            trained: Whether only trained parameters count.
        """
        low_K, high_K = covered(self._holdings.spec, candidates.start_K, candidates.end_K)
        ranks_K = np.where(shards_K, ranks, 1)
        width = self._holdings.table.uses_PR.shape[1]
        questions, inverse_K = distinct_rows(low_K * width + high_K, ranks_K, ratio_K)
        found = np.array(
            [self._answer((code // width, code % width, *rest), trained) for code, *rest in questions.tolist()]
        )
        resident_K, moved_K, largest_K, unit_K = found.T[:, inverse_K]
        return Shares(resident_K=resident_K, moved_K=moved_K, largest_K=largest_K, unit_K=unit_K)

    def _answer(self, question: tuple[float, ...], trained: bool) -> tuple[float, ...]:
        key = (*question, float(trained))
        if key not in self._found:
            low, high, ranks = (int(number) for number in question[:3])
            self._found[key] = self._compute(low, high, ranks, question[3], trained)
        return self._found[key]

    def _compute(self, low: int, high: int, ranks: int, ratio: float, trained: bool) -> tuple[float, ...]:
        table = self._holdings.table
        held_P = np.flatnonzero(table.uses_PR[:, high] > table.uses_PR[:, low])
        bytes_H = (table.trainable_P if trained else table.bytes_P)[held_P]
        moved_H = self.moved(ratio, trained=trained)[held_P]
        # The first unit of this stage that uses it.
        unit_H = np.diff(table.uses_PR[held_P][:, low : high + 1], axis=1).argmax(axis=1)
        owner_H = np.array(assign_owners(bytes_H.astype(np.int64).tolist(), ranks), dtype=np.int64)
        place_H, width = owner_H * (high - low) + unit_H, high - low

        def totals(weights_H: FloatArray) -> FloatArray:
            counted = np.bincount(place_H, weights=weights_H, minlength=ranks * width)
            return np.asarray(counted, dtype=np.float64).reshape(ranks, width)

        kept, away = totals(bytes_H * ~moved_H), totals(bytes_H * moved_H)
        return (
            float(kept.sum(axis=1).max(initial=0.0)),
            float(away.sum(axis=1).max(initial=0.0)),
            float(away.max(initial=0.0)),
            float((kept + away).max(initial=0.0)),
        )


def offloaded_activations(costs: RegionCosts, ratio: float) -> RegionCosts:
    """Costs of regions whose layers have moved a share of what they keep, as the module's docstring says.

    The layer below a region is taken to be recomputed if the region is (for the tail: if the last layer is). So of the
    lowest layer that is not, the one below counts as if it were not either, which is never too little.

    Args:
        costs: What regions cost if nothing is moved.
        ratio: The share.
    """
    share_R = np.full(len(costs.saved_R), ratio)
    share_R[[0, -1]] = 0.0
    saved_R, kept_R = share_R * costs.saved_R, share_R * costs.checkpointed_saved_R
    below_R, kept_below_R = (np.concatenate([[0.0], moved_R[:-1]]) for moved_R in (saved_R, kept_R))
    return replace(
        costs,
        saved_R=costs.saved_R - saved_R,
        checkpointed_saved_R=costs.checkpointed_saved_R - kept_R,
        forward_peak_R=costs.forward_peak_R + below_R,
        recompute_forward_peak_R=costs.recompute_forward_peak_R + kept_below_R,
        backward_peak_R=costs.backward_peak_R + saved_R + below_R,
        first_backward_peak_R=costs.first_backward_peak_R + saved_R + below_R,
        recompute_backward_peak_R=costs.recompute_backward_peak_R + kept_R + kept_below_R,
        first_recompute_backward_peak_R=costs.first_recompute_backward_peak_R + kept_R + kept_below_R,
    )


class OffloadingModel(Protocol):
    """What is asked of the memory model."""

    spec: ModelSpec
    states: StateShares

    def needs(self, slot: StageSlot, candidates: StageCandidates) -> StageNeeds:
        """What the memory of candidates is made of."""

    def variant(self, key: tuple[float, float], build: Callable[[], tuple[ModelSpec, Adjustment]]) -> "OffloadingModel":
        """The same with other parameters and changed costs of regions, built once for each key."""


def _stays(model: OffloadingModel, activations: float, gradients: float) -> OffloadingModel:
    """The network of what stays on the device: gradients of moved parameters are made and are gone."""

    def build() -> tuple[ModelSpec, Adjustment]:
        moved_P = model.states.moved(gradients, trained=True)
        parameters = tuple(
            replace(item, trainable=False) if moved else item
            for item, moved in zip(model.spec.parameters, moved_P, strict=True)
        )
        adjustment = partial(offloaded_activations, ratio=activations) if activations else unadjusted
        return replace(model.spec, parameters=parameters), adjustment

    return model.variant((activations, gradients), build)


def _plain(candidates: StageCandidates) -> tuple[StageCandidates, OffloadCandidates]:
    offload = candidates.offload
    if offload is None:
        raise ValueError("candidates.offload = None: nothing is offloaded; ask for the needs without offload")
    return replace(candidates, offload=None), offload


def offloaded_needs(model: OffloadingModel, slot: StageSlot, candidates: StageCandidates) -> StageNeeds:
    """What the memory of candidates that offload is made of.

    Args:
        model: The network's memory.
        slot: Their place.
        candidates: The stages, with ratios.
    """
    plain, offload = _plain(candidates)
    if not len(candidates):
        return model.needs(slot, plain)
    pairs, pair_K = distinct_rows(offload.activations_K, offload.gradients_K)
    parts = []
    for index, (activations, gradients) in enumerate(pairs.tolist()):
        at_J = np.flatnonzero(pair_K == index)
        parts.append((at_J, _stays(model, activations, gradients).needs(slot, plain.take(at_J))))
    return _with_states(model, slot, candidates, _joined(parts, len(candidates)), model.needs(slot, plain))


def _joined(parts: Sequence[tuple[IntArray, StageNeeds]], count: int) -> StageNeeds:
    """Needs of groups of candidates as those of all."""
    if len(parts) == 1:
        return parts[0][1]

    def scatter(values: Sequence[Bytes]) -> FloatArray:
        found_K = np.empty(count)
        for (at_J, _), value in zip(parts, values, strict=True):
            found_K[at_J] = value
        return found_K

    first = parts[0][1]
    arrays: dict[str, Any] = {
        name: scatter([getattr(needs, name) for _, needs in parts]) for name in first.__slots__ if name.endswith("_K")
    }
    update = []
    for position, (name, terms) in enumerate(first.update):
        found = {term: scatter([needs.update[position][1][term] for _, needs in parts]) for term in terms}
        update.append((name, found))
    return replace(first, update=tuple(update), **arrays)


def _with_states(
    model: OffloadingModel, slot: StageSlot, candidates: StageCandidates, stays: StageNeeds, whole: StageNeeds
) -> StageNeeds:
    """Needs with what stays of parameters and state, and the buffers.

    Args:
        model: The network's memory.
        slot: Their place.
        candidates: The stages.
        stays: Their needs with activations and gradients as far as they stay.
        whole: Their needs if nothing is moved.
    """
    parameters, gradients, optimizer = _states(model, slot, candidates)
    zero_K, spec = candidates.zero_stage_K, model.spec.optimizer
    state = spec.state_bytes_per_parameter_byte
    buffers_K = parameters.largest_K + gradients.largest_K + state * optimizer.largest_K
    owned = _gradients(model, slot, candidates, ZeroStage.OPTIMIZER)
    always: Mapping[str, Bytes] = {
        **whole.always,
        "parameter_bytes": parameters.resident_K,
        "optimizer_bytes": state * optimizer.resident_K,
        "offload_bytes": BUFFERS * buffers_K,
    }
    all_K = optimizer.resident_K + optimizer.moved_K
    stepped_K = np.where(optimizer.moved_K > 0, optimizer.unit_K, all_K)
    largest_K = whole.weight_backward_K - whole.waiting_K
    step_K = spec.step_peak_bytes_per_parameter_byte * stepped_K + spec.step_peak_bytes_per_largest * np.minimum(
        largest_K, stepped_K
    )
    gathered = dict(whole.update).get("parameter gathering", {})
    changed: dict[str, Mapping[str, Bytes]] = {
        "optimizer step": {"gradient_bytes": owned.resident_K, "working_bytes": step_K},
        "parameter gathering": {**gathered, "gradient_bytes": owned.resident_K},
    }
    kept_K = np.where(zero_K >= ZeroStage.GRADIENTS, gradients.resident_K, stays.gradients_K)
    return replace(
        stays,
        always=always,
        gradients_K=kept_K,
        weight_backward_K=whole.weight_backward_K,
        update=tuple((name, changed.get(name, terms)) for name, terms in stays.update),
    )


def _states(model: OffloadingModel, slot: StageSlot, candidates: StageCandidates) -> tuple[Shares, Shares, Shares]:
    """Shares of parameters, gradients and optimizer state."""
    _, offload = _plain(candidates)
    ranks, zero_K = slot.shard_degree, candidates.zero_stage_K
    return (
        model.states.of(candidates, offload.parameters_K, ranks, zero_K >= ZeroStage.PARAMETERS, trained=False),
        _gradients(model, slot, candidates, ZeroStage.GRADIENTS),
        model.states.of(candidates, offload.optimizer_K, ranks, zero_K >= ZeroStage.OPTIMIZER, trained=True),
    )


def _gradients(model: OffloadingModel, slot: StageSlot, candidates: StageCandidates, since: ZeroStage) -> Shares:
    """Shares of gradients, shared out from a ZeRO stage on."""
    _, offload = _plain(candidates)
    shards_K = candidates.zero_stage_K >= since
    return model.states.of(candidates, offload.gradients_K, slot.shard_degree, shards_K, trained=True)


def host_bytes(
    model: OffloadingModel,
    slot: StageSlot,
    candidates: StageCandidates,
    needs: StageNeeds,
    phases: Sequence[Phase],
) -> FloatArray:
    """Pinned host memory of one device of each candidate.

    Args:
        model: The network's memory.
        slot: Their place.
        candidates: The stages.
        needs: Their needs as they are.
        phases: The situations of the slot, which say how many microbatches are in flight.
    """
    if candidates.offload is None:
        return np.zeros(len(candidates))
    microbatch_K = host_microbatch_bytes(model, slot, candidates, needs)
    return host_state_bytes(model, slot, candidates) + in_flight(phases) * microbatch_K


def in_flight(phases: Sequence[Phase]) -> int:
    """The most microbatches whose activations a slot keeps.

    Args:
        phases: The situations of the slot.
    """
    return max(phase.others + (phase.kind != "transfer") for phase in phases)


def host_state_bytes(model: OffloadingModel, slot: StageSlot, candidates: StageCandidates) -> FloatArray:
    """Host memory of what a device moves of parameters, gradients and optimizer state."""
    parameters, gradients, optimizer = _states(model, slot, candidates)
    state = model.spec.optimizer.state_bytes_per_parameter_byte
    moved_K: FloatArray = parameters.moved_K + gradients.moved_K + state * optimizer.moved_K
    return moved_K


def host_microbatch_bytes(
    model: OffloadingModel, slot: StageSlot, candidates: StageCandidates, needs: StageNeeds
) -> FloatArray:
    """Host memory of what layers move of one microbatch's activations."""
    plain, _ = _plain(candidates)
    moved_K: FloatArray = model.needs(slot, plain).saved_K - needs.saved_K
    return moved_K
