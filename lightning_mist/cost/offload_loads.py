"""What every unit of a stage that offloads has to compute, exchange and copy, in seconds of each channel.

Bytes are those of :mod:`lightning_mist.cost.offload`: whole parameters are moved, and of what is dealt out over ranks
the rank that has most counts, its bytes spread over the units as all ranks' are. A parameter that several units use is
fetched for each of them.

Array axes
    K  candidates
    Q  distinct questions among them: ZeRO stage, ratios, and the parts of the rank that has most
    R  units, which are regions; padded in front by one that is empty, and behind by two
    P  parameters
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from lightning_mist.cost.candidates import OffloadCandidates, StageCandidates, StageSlot
from lightning_mist.cost.channels import CopyRates
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.distinct import distinct_rows
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.regions import covered
from lightning_mist.cost.shards import UnitSeconds
from lightning_mist.cost.time import RegionSeconds
from lightning_mist.plan import ZeroStage

BEFORE, BEHIND = 1, 2
"""Empty units in front of the first and behind the last, so that neighbours always have an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutCopies:
    """Seconds of a stage that are known before its copies are.

    Attributes:
        compute: Forward and backward of every region.
        units: Communication of every unit among the ranks that shard; ``None`` if nothing is sharded.
        update_K: The optimizer's arithmetic.
        reduce_K: Averaging all gradients after the last microbatch, hidden or not.
        gather_K: Giving out all updated parameters, hidden or not.
    """

    compute: RegionSeconds
    units: UnitSeconds | None
    update_K: FloatArray
    reduce_K: FloatArray
    gather_K: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Seconds of every unit by question, padded; what a unit does not have is 0.

    Attributes:
        forward_QR: Computing its forward.
        backward_QR: Computing its backward.
        update_QR: Computing its update.
        unshard_QR: Giving out its parameters in every microbatch.
        scatter_QR: Reducing its gradients in every microbatch.
        reduce_QR: Averaging its gradients after the last microbatch.
        gather_QR: Giving out its updated parameters.
        parameters_in_QR: Fetching its moved parameters.
        gradients_in_QR: Fetching its moved gradients.
        gradients_out_QR: Writing them back.
        state_in_QR: Fetching what its update needs: optimizer state and gradients.
        state_out_QR: Writing back what its update changed: optimizer state and parameters.
        saved_in_QR, saved_out_QR: Fetching and moving away the activations of a layer that is not recomputed.
        kept_in_QR, kept_out_QR: The same of one that is.
    """

    forward_QR: FloatArray
    backward_QR: FloatArray
    update_QR: FloatArray
    unshard_QR: FloatArray
    scatter_QR: FloatArray
    reduce_QR: FloatArray
    gather_QR: FloatArray
    parameters_in_QR: FloatArray
    gradients_in_QR: FloatArray
    gradients_out_QR: FloatArray
    state_in_QR: FloatArray
    state_out_QR: FloatArray
    saved_in_QR: FloatArray
    saved_out_QR: FloatArray
    kept_in_QR: FloatArray
    kept_out_QR: FloatArray

    @classmethod
    def of(cls, seconds: Mapping[str, FloatArray], shape: tuple[int, int]) -> "Loads":
        """Seconds by name as loads.

        Args:
            seconds: Seconds of every unit, of each question or of all alike.
            shape: Numbers of questions and of units.
        """
        found = {}
        for name, values in seconds.items():
            found[name] = np.zeros((shape[0], shape[1] + BEFORE + BEHIND))
            found[name][:, BEFORE:-BEHIND] = values
        return cls(**found)

    def take(self, row_U: IntArray) -> "Loads":
        """The loads of some questions."""
        return Loads(**{item.name: getattr(self, item.name)[row_U] for item in fields(self)})

    def table(self, unit_X: IntArray) -> FloatArray:
        """All seconds of some padded units; axes: which, ``Q``, ``X``."""
        return np.stack([getattr(self, item.name)[:, unit_X] for item in fields(self)])

    def differs(self) -> BoolArray:
        """Of every padded unit but the first, whether it differs from the one before."""
        found: BoolArray = np.zeros(self.forward_QR.shape[1] - 1, dtype=bool)
        for item in fields(self):
            values_QR: FloatArray = getattr(self, item.name)
            found |= (values_QR[:, 1:] != values_QR[:, :-1]).any(axis=0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """Of each candidate, which part of a unit's bytes the rank that has most moves, by kind of state."""

    parameters_K: FloatArray
    gradients_K: FloatArray
    owned_gradients_K: FloatArray
    optimizer_K: FloatArray


def loads_of(
    memory: MemoryModel, slot: StageSlot, candidates: StageCandidates, known: WithoutCopies, rates: CopyRates
) -> tuple[Loads, IntArray]:
    """The loads of candidates that offload, and which row of them each candidate has.

    Args:
        memory: The network.
        slot: Their place.
        candidates: The stages, with ratios.
        known: Their other seconds.
        rates: Bytes per second of copies.
    """
    offload = _ratios(candidates)
    parts = parts_of_ranks(memory, slot, candidates)
    trained_K = _within(memory, candidates, memory.holdings.table.trained_R[None])
    per_byte = [total_K / np.maximum(trained_K, 1.0) for total_K in (known.update_K, known.reduce_K, known.gather_K)]
    columns = (
        candidates.zero_stage_K,
        offload.parameters_K,
        offload.gradients_K,
        offload.optimizer_K,
        offload.activations_K,
        parts.parameters_K,
        parts.gradients_K,
        parts.owned_gradients_K,
        parts.optimizer_K,
        *per_byte,
        memory.holdings.table.reduced_row_R[covered(memory.spec, candidates.start_K, candidates.end_K)[0]],
    )
    questions_QX, question_K = distinct_rows(*columns)
    return _Questions(memory, slot, questions_QX, known, rates).loads(), question_K


class _Questions:
    """Turns distinct questions into loads."""

    def __init__(
        self, memory: MemoryModel, slot: StageSlot, questions_QX: FloatArray, known: WithoutCopies, rates: CopyRates
    ) -> None:
        self.memory, self.slot, self.known, self.rates = memory, slot, known, rates
        self.columns = questions_QX.T
        self.used_PR = np.diff(memory.holdings.table.uses_PR, axis=1).astype(np.float64)

    def loads(self) -> Loads:
        """Seconds of every unit."""
        zero_Q, parameters_Q, gradients_Q, optimizer_Q, activations_Q, *rest = self.columns
        part_Q, gradient_Q, owned_Q, state_Q, update_Q, reduce_Q, gather_Q = (values[:, None] for values in rest[:-1])
        table = self.memory.holdings.table
        costs = self.memory.costs(self.slot.rows, self.slot.context_parallel_degree)
        trains_P = table.trainable_P > 0
        # Bytes of every unit that are moved, before they are dealt out.
        moved_QR = self._moved(parameters_Q, table.bytes_P, trained=False)
        changed_QR = self._moved(parameters_Q, table.bytes_P * trains_P, trained=False)
        graded_QR = self._moved(gradients_Q, table.trainable_P, trained=True)
        state = self.memory.spec.optimizer.state_bytes_per_parameter_byte
        state_QR = state_Q * state * self._moved(optimizer_Q, table.trainable_P, trained=True)
        is_layer_R = np.ones(len(costs.saved_R))
        is_layer_R[[0, -1]] = 0.0
        saved_QR, kept_QR = (
            activations_Q[:, None] * is_layer_R * bytes_R for bytes_R in (costs.saved_R, costs.checkpointed_saved_R)
        )
        # The first microbatch of a batch has no gradients to fetch.
        again = 1.0 if self.slot.num_microbatches > 1 else 0.0
        compute, none_R = self.known.compute, np.zeros(len(costs.saved_R))
        units, reduced_row_Q = self.known.units, rest[-1].astype(np.int64)
        unshard_R = none_R if units is None else units.unshard_R
        reduce_QR = none_R if units is None else units.reduce_FR[reduced_row_Q]
        to_device, to_host = self.rates.to_device, self.rates.to_host
        found = {
            "forward_QR": compute.forward_R,
            "backward_QR": compute.backward_R,
            "update_QR": update_Q * table.trained_R,
            "unshard_QR": (zero_Q >= ZeroStage.PARAMETERS)[:, None] * unshard_R,
            "scatter_QR": (zero_Q >= ZeroStage.GRADIENTS)[:, None] * reduce_QR,
            "reduce_QR": reduce_Q * table.trained_R,
            "gather_QR": gather_Q * table.trained_R,
            "parameters_in_QR": part_Q * moved_QR / to_device,
            "gradients_in_QR": again * gradient_Q * graded_QR / to_device,
            "gradients_out_QR": gradient_Q * graded_QR / to_host,
            "state_in_QR": (state_QR + owned_Q * graded_QR) / to_device,
            "state_out_QR": (state_QR + part_Q * changed_QR) / to_host,
            "saved_in_QR": saved_QR / to_device,
            "saved_out_QR": saved_QR / to_host,
            "kept_in_QR": kept_QR / to_device,
            "kept_out_QR": kept_QR / to_host,
        }
        return Loads.of(found, (len(self.columns[0]), len(none_R)))

    def _moved(self, ratio_Q: FloatArray, bytes_P: FloatArray, *, trained: bool) -> FloatArray:
        return _moved_units(
            lambda ratio: self.memory.states.moved(ratio, trained=trained), ratio_Q, bytes_P, self.used_PR
        )


def _moved_units(
    moved: Callable[[float], BoolArray], ratio_K: FloatArray, bytes_P: FloatArray, used_PR: FloatArray
) -> FloatArray:
    """Moved bytes of every unit, where every unit fetches what it uses; axes ``K``, ``R``."""
    ratios_U, inverse_K = distinct_rows(ratio_K)
    found_UR = np.stack([(bytes_P * moved(float(ratio))) @ used_PR for ratio in ratios_U[:, 0]])
    found_KR: FloatArray = found_UR[inverse_K]
    return found_KR


def _ratios(candidates: StageCandidates) -> OffloadCandidates:
    if candidates.offload is None:
        raise ValueError("candidates.offload = None: nothing is offloaded, so there are no copies")
    return candidates.offload


def _within(
    memory: MemoryModel, candidates: StageCandidates, values_UR: FloatArray, row_K: IntArray | None = None
) -> FloatArray:
    """Sum of a row of values over the units of each candidate."""
    low_K, high_K = covered(memory.spec, candidates.start_K, candidates.end_K)
    prefix_UR = np.pad(np.cumsum(values_UR, axis=1), ((0, 0), (1, 0)))
    rows = np.zeros(len(candidates), dtype=np.int64) if row_K is None else row_K
    result_K: FloatArray = prefix_UR[rows, high_K] - prefix_UR[rows, low_K]
    return result_K


def parts_of_ranks(memory: MemoryModel, slot: StageSlot, candidates: StageCandidates) -> RankParts:
    """What part of every kind of moved state the rank that has most moves.

    The update of a parameter happens once, however many units fetch it.
    """
    offload, states, ranks, zero_K = _ratios(candidates), memory.states, slot.shard_degree, candidates.zero_stage_K
    used_PR = np.diff(memory.holdings.table.uses_PR, axis=1).astype(np.float64)

    def part(ratio_K: FloatArray, since: ZeroStage, *, trained: bool, once: bool = False) -> FloatArray:
        shards_K, part_K = (zero_K >= since) & (ranks > 1), np.ones(len(candidates))
        at_J = np.flatnonzero((shards_K | once) & (ratio_K > 0))
        if not len(at_J):
            return part_K
        some, ratio_J = candidates.take(at_J), ratio_K[at_J]
        most_J = states.of(some, ratio_J, ranks, shards_K[at_J], trained=trained).moved_K
        if once:
            ratios_U, row_J = distinct_rows(ratio_J)
            moved_UP = np.stack([states.moved(float(ratio), trained=trained) for ratio in ratios_U[:, 0]])
            all_J = _within(memory, some, (moved_UP * memory.holdings.table.trainable_P) @ used_PR, row_J)
        else:
            all_J = states.of(some, ratio_J, 1, shards_K[at_J], trained=trained).moved_K
        part_K[at_J] = most_J / np.maximum(all_J, 1.0)
        return part_K

    return RankParts(
        parameters_K=part(offload.parameters_K, ZeroStage.PARAMETERS, trained=False),
        gradients_K=part(offload.gradients_K, ZeroStage.GRADIENTS, trained=True),
        owned_gradients_K=part(offload.gradients_K, ZeroStage.OPTIMIZER, trained=True, once=True),
        optimizer_K=part(offload.optimizer_K, ZeroStage.OPTIMIZER, trained=True, once=True),
    )
