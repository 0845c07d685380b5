"""What host copies add to the seconds of stages at least, for every combination of ratios, without asking about units.

A pass of :mod:`lightning_mist.cost.offload_time` is a sum of what units take with copies beside them, and of what
hides behind nothing. What loads of a unit take together is at least :func:`.overlap_floor.least_seconds` of them, and
the sum of these is at least that of all units' loads together. Let ``F`` and ``B`` be the seconds of a forward and of a
backward without copies, ``F'`` and ``B'`` those of the first forward and of the last backward of a batch; and ``f``,
``b``, ``f'``, ``b'`` such floors of the same with copies. Then copies add to the steady time at least

    max(f - F, 0) + max(b - B, 0).

Averaging gradients takes ``r`` without copies, and with them what the last backward takes beyond another one more: at
least ``r + b' - b'' - B' + B`` if the other one takes ``b''``, of which the steady time has ``b'' - B`` more. If the
update, of ``u`` seconds by itself, waits for the first forward, so does giving out parameters, which then takes
``h = max(F' - F - u, 0)``; what copies add there is counted likewise. So for a batch and a microbatch a stage takes

    max(f - F + h, h, f' - F - u) + max(b - B, r + b' - B', 0)        if the update waits,
    max(f - F, 0) + e + max(b - B, r + b' - B', 0)                    if it does not

more at least than without copies, averaging and giving out parameters, for which ``e`` stands here.

Array axes
    B  stages
    P, G, O  ratios of parameters, gradients, optimizer state
    R  regions
    F  rows of gradients that are reduced, by where stages begin
    J  stages with ratios
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.beside_copies import BesideCopies
from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.offload_parts import MovedShares, Ratios, moved_shares
from lightning_mist.cost.offload_shares import MovedBytes, Shares
from lightning_mist.cost.overlap_floor import least_seconds
from lightning_mist.cost.regions import covered
from lightning_mist.cost.sums import prefix_sums
from lightning_mist.plan import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFloors:
    """Sums of loads of stages, in seconds of each channel; ``_end`` is what hides behind nothing.

    Attributes:
        forward_B, backward_B: Computing.
        unshard_B, unshard_end_B: Communicating in a forward.
        network_B, network_end_B: Communicating in a backward.
        update_B: Computing the update.
        gather_B, gather_end_B: Giving out updated parameters in the first forward.
        reduce_B, reduce_end_B: Averaging gradients in the last backward.
        alone_BX: Seconds without copies of a forward, of the first one, of a backward, of the last one.
        exposed_B: Averaging gradients without copies, as far as it does not hide.
        updating_B, averaging_B, giving_B: Updating, averaging and giving out of the whole stage without copies, hidden
            or not.
        parameters_BP, parameters_end_BP: Fetching parameters in a forward.
        again_BP, again_end_BP: Fetching them in a backward.
        written_BP: Writing back what an update changed of them.
        gradients_BG, gradients_end_BG: Fetching gradients.
        returned_BG, returned_end_BG: Writing them back.
        stepped_BG, stepped_end_BG: Fetching them for an update.
        state_BO, state_end_BO: Fetching optimizer state.
        stored_BO: Writing it back.
        away_BX: All activations: moving away beside units and behind the last one, and fetching them likewise.
    """

    forward_B: FloatArray
    backward_B: FloatArray
    unshard_B: FloatArray
    unshard_end_B: FloatArray
    network_B: FloatArray
    network_end_B: FloatArray
    update_B: FloatArray
    gather_B: FloatArray
    gather_end_B: FloatArray
    reduce_B: FloatArray
    reduce_end_B: FloatArray
    alone_BX: FloatArray
    exposed_B: FloatArray
    updating_B: FloatArray
    averaging_B: FloatArray
    giving_B: FloatArray
    parameters_BP: FloatArray
    parameters_end_BP: FloatArray
    again_BP: FloatArray
    again_end_BP: FloatArray
    written_BP: FloatArray
    gradients_BG: FloatArray
    gradients_end_BG: FloatArray
    returned_BG: FloatArray
    returned_end_BG: FloatArray
    stepped_BG: FloatArray
    stepped_end_BG: FloatArray
    state_BO: FloatArray
    state_end_BO: FloatArray
    stored_BO: FloatArray
    away_BX: FloatArray

    @classmethod
    def nothing(cls, count: int, ratios: Ratios) -> "CopyFloors":
        """Those of stages of which only is known that copies take no time away."""
        sizes = dict(zip("PGO", ratios.shape, strict=False)) | {"X": 4}
        wide = {name: sizes.get(name[-1]) for name in cls.__slots__}
        return cls(
            **{name: np.zeros(count) if size is None else np.zeros((count, size)) for name, size in wide.items()}
        )

    @classmethod
    def joined(cls, items: Sequence["CopyFloors"]) -> "CopyFloors":
        """Those of the stages of all."""
        return cls(**{name: np.concatenate([getattr(item, name) for item in items]) for name in cls.__slots__})

    def take(self, index_J: IntArray) -> "CopyFloors":
        """Those of the stages at some indices."""
        return CopyFloors(**{name: getattr(self, name)[index_J] for name in self.__slots__})

    def added(
        self,
        weights: FloatArray,
        row_J: IntArray,
        place_JX: IntArray,
        activations_J: FloatArray,
    ) -> tuple[FloatArray, FloatArray]:
        """What copies add at least to the steady seconds, and to those of a batch, of stages with ratios.

        Args:
            weights: How channels slow each other down.
            row_J: Which stage each is of.
            place_JX: Which ratios of parameters, gradients and optimizer state it has.
            activations_J: Its ratio of activations.

        Returns:
            Seconds beyond the steady time without copies; and, of it and the boundary time, beyond both without
            copies, averaging gradients and giving out parameters.
        """
        p, g, o = ((row_J, place_J) for place_J in place_JX.T)
        is_deferred_J = (place_JX > 0).any(axis=1)
        away_J, away_end_J, back_J, back_end_J = activations_J * self.away_BX[row_J].T
        alone_J, alone_first_J, alone_backward_J, alone_last_J = self.alone_BX[row_J].T
        computed_J, update_J = self.forward_B[row_J], self.update_B[row_J]
        fetched_J, unshard_J = self.parameters_BP[p], self.unshard_B[row_J]
        end_J = self.unshard_end_B[row_J] + self.parameters_end_BP[p] + away_end_J
        forward_J = least_seconds(weights, computed_J, unshard_J, fetched_J, away_J) + end_J
        first_J = least_seconds(
            weights,
            computed_J + update_J,
            unshard_J + self.gather_B[row_J],
            fetched_J + self.state_BO[o] + self.stepped_BG[g],
            away_J + self.stored_BO[o] + self.written_BP[p],
        )
        first_J = first_J + end_J + self.gather_end_B[row_J] + self.state_end_BO[o] + self.stepped_end_BG[g]
        loads = self.again_BP[p] + self.gradients_BG[g] + back_J, self.returned_BG[g]
        computed_J, network_J = self.backward_B[row_J], self.network_B[row_J]
        end_J = self.network_end_B[row_J] + self.again_end_BP[p] + self.gradients_end_BG[g]
        end_J = end_J + back_end_J + self.returned_end_BG[g]
        backward_J = least_seconds(weights, computed_J, network_J, *loads) + end_J
        last_J = least_seconds(weights, computed_J, network_J + self.reduce_B[row_J], *loads) + end_J
        last_J = last_J + self.reduce_end_B[row_J]
        more_J, later_J = np.maximum(forward_J - alone_J, 0.0), np.maximum(backward_J - alone_backward_J, 0.0)
        hidden_J = np.maximum(alone_first_J - alone_J - update_J, 0.0)
        given_J = self.gather_B[row_J] + self.gather_end_B[row_J]
        once_J = np.where(is_deferred_J, np.maximum(more_J + hidden_J, first_J - alone_J - update_J), more_J + given_J)
        averaged_J = self.exposed_B[row_J] + last_J - alone_last_J
        return more_J + later_J, once_J + np.maximum(later_J, averaged_J)


def copy_floors(
    memory: MemoryModel,
    slot: StageSlot,
    candidates: StageCandidates,
    machine: BesideCopies,
    ratios: Ratios,
    shares: MovedShares | None = None,
) -> CopyFloors:
    """The sums of stages at one place.

    Args:
        memory: The network, or one tensor-parallel rank's part of it.
        slot: Their place.
        candidates: The stages, without ratios.
        machine: What else they do.
        ratios: What may be moved.
        shares: What of it is moved, if that is known.
    """
    sums = _Sums(memory, candidates)
    found = moved_shares(memory, slot, candidates, ratios) if shares is None else shares
    parts = _parts(memory, slot, sums, ratios, found)
    return CopyFloors(**_passes(sums, memory, machine), **_states(sums, memory, slot, machine, ratios, parts))


_Parts: TypeAlias = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
"""By ratios of parameters, of gradients twice, and of optimizer state."""


class _Sums:
    """Sums over the units of stages.

    Args:
        memory: The network.
        candidates: The stages.
    """

    def __init__(self, memory: MemoryModel, candidates: StageCandidates) -> None:
        self.candidates = candidates
        self.low_B, self.high_B = covered(memory.spec, candidates.start_K, candidates.end_K)
        self.last_B = self.high_B - 1
        self.first_B = candidates.start_K + 1
        self.middle_B = self.first_B + candidates.checkpointed_K

    def between(
        self, values_R: FloatArray, begin_B: IntArray, end_B: IntArray, row_B: IntArray | None = None
    ) -> FloatArray:
        """Sums over units from one to before another; of several rows, with an axis for them behind, or of one each."""
        sums, end_B = prefix_sums(values_R), np.maximum(begin_B, end_B)
        if values_R.ndim == 1:
            return sums[end_B] - sums[begin_B]
        if row_B is not None:
            result_B: FloatArray = sums[row_B, end_B] - sums[row_B, begin_B]
            return result_B
        result_BX: FloatArray = (sums[:, end_B] - sums[:, begin_B]).T
        return result_BX


def _passes(sums: _Sums, memory: MemoryModel, machine: BesideCopies) -> dict[str, FloatArray]:
    """Computing and communicating."""
    low_B, high_B, last_B = sums.low_B, sums.high_B, sums.last_B
    table, zero_B = memory.holdings.table, sums.candidates.zero_stage_K
    forward_R, backward_R, units = machine.compute.forward_R, machine.compute.backward_R, machine.units
    none_R, row_B = np.zeros(len(forward_R)), table.reduced_row_R[low_B]
    unshard_R, reduce_FR = (none_R, none_R[None]) if units is None else (units.unshard_R, units.reduce_FR)
    row_B = row_B if units is not None else np.zeros_like(low_B)
    shards_B, reduces_B = zero_B >= ZeroStage.PARAMETERS, zero_B >= ZeroStage.GRADIENTS
    trained_B = np.maximum(sums.between(table.trained_R, low_B, high_B), 1.0)
    update_B, reduce_B, gather_B = (
        values_B / trained_B for values_B in (machine.update_B, machine.once.whole_K, machine.once.gather_K)
    )
    behind_B, first_B = sums.between(table.trained_R, low_B + 1, high_B), table.trained_R[low_B]
    scattered_B = sums.between(reduce_FR, low_B + 1, high_B, row_B) * reduces_B
    return {
        "forward_B": sums.between(forward_R, low_B, high_B),
        "backward_B": sums.between(backward_R, low_B, high_B) + sums.between(forward_R, sums.first_B, sums.middle_B),
        "unshard_B": sums.between(unshard_R, low_B + 1, high_B) * shards_B,
        "unshard_end_B": unshard_R[low_B] * shards_B,
        "network_B": sums.between(unshard_R, low_B, last_B) * shards_B + scattered_B,
        "network_end_B": unshard_R[last_B] * shards_B + reduce_FR[row_B, low_B] * reduces_B,
        "update_B": update_B * (behind_B + first_B),
        "gather_B": gather_B * behind_B,
        "gather_end_B": gather_B * first_B,
        "reduce_B": reduce_B * behind_B,
        "reduce_end_B": reduce_B * first_B,
        "alone_BX": _alone(
            sums,
            machine,
            (shards_B[:, None] * unshard_R, reduces_B[:, None] * reduce_FR[row_B]),
            tuple(values_B[:, None] * table.trained_R for values_B in (update_B, gather_B, reduce_B)),
        ),
        "exposed_B": machine.once.exposed_K,
        "updating_B": machine.update_B,
        "averaging_B": machine.once.whole_K,
        "giving_B": machine.once.gather_K,
    }


def _alone(
    sums: _Sums,
    machine: BesideCopies,
    every: tuple[FloatArray, FloatArray],
    once: tuple[FloatArray, ...],
) -> FloatArray:
    """Seconds without copies of a forward, of the first one, of a backward, of the last one.

    Args:
        sums: The stages.
        machine: What else they do.
        every: Unsharding and reducing of units in every microbatch; axes ``B`` and ``R``.
        once: Updating, giving out and averaging once per batch.
    """
    forward_R, backward_R = machine.compute.forward_R, machine.compute.backward_R
    place_R, index_B = np.arange(len(forward_R)), np.arange(len(sums.low_B))
    low_B1, last_B1 = sums.low_B[:, None], sums.last_B[:, None]
    inside_BR = (place_R >= low_B1) & (place_R <= last_B1)
    is_again_BR = (place_R >= sums.first_B[:, None]) & (place_R < sums.middle_B[:, None])
    backward_BR = np.where(is_again_BR, backward_R + forward_R, backward_R)
    has_next_BR, has_below_BR = place_R < last_B1, place_R > low_B1

    def following(values_BR: FloatArray) -> FloatArray:
        found_BR = np.zeros(values_BR.shape)
        np.multiply(values_BR[:, 1:], has_next_BR[:, :-1], out=found_BR[:, :-1])
        return found_BR

    def below(values_BR: FloatArray) -> FloatArray:
        found_BR = np.zeros(values_BR.shape)
        np.multiply(values_BR[:, :-1], has_below_BR[:, 1:], out=found_BR[:, 1:])
        return found_BR

    def total(compute_BR: FloatArray, network_BR: FloatArray) -> FloatArray:
        result_B: FloatArray = (machine.together(compute_BR, network_BR) * inside_BR).sum(axis=1)
        return result_B

    (unshard_BR, reduce_BR), (update_BR, gather_BR, average_BR) = every, once
    next_BR, below_BR = following(unshard_BR), below(unshard_BR)
    low = index_B, sums.low_B
    begin_B, end_B = unshard_BR[low], unshard_BR[index_B, sums.last_B] + reduce_BR[low]
    behind_BR = below_BR + following(reduce_BR)
    return np.stack(
        [
            total(forward_R + np.zeros_like(next_BR), next_BR) + begin_B,
            total(forward_R + following(update_BR), next_BR + following(gather_BR))
            + (begin_B + gather_BR[low] + update_BR[low]),
            total(backward_BR, behind_BR) + end_B,
            total(backward_BR, behind_BR + following(average_BR)) + (end_B + average_BR[low]),
        ],
        axis=1,
    )


def _states(
    sums: _Sums, memory: MemoryModel, slot: StageSlot, machine: BesideCopies, ratios: Ratios, parts: _Parts
) -> dict[str, FloatArray]:
    """Copies of every kind of state."""
    low_B, high_B, last_B = sums.low_B, sums.high_B, sums.last_B
    to_device, to_host = machine.rates.to_device, machine.rates.to_host

    def moved(values: Sequence[float], of: MovedBytes) -> FloatArray:
        return np.stack([memory.states.unit_bytes(ratio, of) for ratio in values])

    whole_XR, changed_XR = moved(ratios.parameters, "parameters"), moved(ratios.parameters, "changed")
    graded_XR = moved(ratios.gradients, "trained")
    state_XR = moved(ratios.optimizer, "trained") * memory.spec.optimizer.state_bytes_per_parameter_byte
    part_BP, graded_BG, owned_BG, state_BO = parts
    again = 1.0 if slot.num_microbatches > 1 else 0.0
    costs = memory.costs(slot.rows, slot.context_parallel_degree)
    saved_R, kept_R = (values_R * _is_layer(len(values_R)) for values_R in (costs.saved_R, costs.checkpointed_saved_R))
    away_B = sums.between(saved_R, low_B, last_B)
    away_B = away_B + sums.between(kept_R - saved_R, sums.first_B, np.minimum(sums.middle_B, last_B))
    is_again_B = (last_B >= sums.first_B) & (last_B < sums.middle_B)
    away_end_B = np.where(is_again_B, kept_R[last_B], saved_R[last_B])
    return {
        "parameters_BP": part_BP * sums.between(whole_XR, low_B + 1, high_B) / to_device,
        "parameters_end_BP": part_BP * whole_XR[:, low_B].T / to_device,
        "again_BP": part_BP * sums.between(whole_XR, low_B, last_B) / to_device,
        "again_end_BP": part_BP * whole_XR[:, last_B].T / to_device,
        "written_BP": part_BP * sums.between(changed_XR, low_B, high_B) / to_host,
        "gradients_BG": again * graded_BG * sums.between(graded_XR, low_B, last_B) / to_device,
        "gradients_end_BG": again * graded_BG * graded_XR[:, last_B].T / to_device,
        "returned_BG": graded_BG * sums.between(graded_XR, low_B + 1, high_B) / to_host,
        "returned_end_BG": graded_BG * graded_XR[:, low_B].T / to_host,
        "stepped_BG": owned_BG * sums.between(graded_XR, low_B + 1, high_B) / to_device,
        "stepped_end_BG": owned_BG * graded_XR[:, low_B].T / to_device,
        "state_BO": state_BO * sums.between(state_XR, low_B + 1, high_B) / to_device,
        "state_end_BO": state_BO * state_XR[:, low_B].T / to_device,
        "stored_BO": state_BO * sums.between(state_XR, low_B, high_B) / to_host,
        "away_BX": np.stack(
            [away_B / to_host, away_end_B / to_host, away_B / to_device, away_end_B / to_device], axis=1
        ),
    }


def _is_layer(count: int) -> FloatArray:
    found_R = np.ones(count)
    found_R[[0, -1]] = 0.0
    return found_R


def _parts(memory: MemoryModel, slot: StageSlot, sums: _Sums, ratios: Ratios, shares: MovedShares) -> _Parts:
    """Of each kind of state and ratio, what part the rank that has most moves; of gradients also of what it owns.

    As of :func:`~lightning_mist.cost.offload_ranks.parts_of_ranks`.
    """
    candidates, ranks = sums.candidates, slot.shard_degree
    zero_B, alone_B = candidates.zero_stage_K, np.zeros(len(candidates), dtype=bool)

    def part(values: tuple[float, ...], most: Shares, every_BX: FloatArray, at_B: BoolArray) -> FloatArray:
        is_part_BX = at_B[:, None] & (np.array(values) > 0)
        return np.where(is_part_BX, most.moved_K / np.maximum(every_BX, 1.0), 1.0)

    def held(values: tuple[float, ...], *, trained: bool) -> FloatArray:
        return memory.states.of_ratios(candidates, values, 1, alone_B, trained=trained).moved_K

    def updated(values: tuple[float, ...]) -> FloatArray:
        # The update of a parameter happens once, however many units fetch it.
        moved_XR = np.stack([memory.states.unit_bytes(ratio, "trained") for ratio in values])
        return sums.between(moved_XR, sums.low_B, sums.high_B)

    always_B = ~alone_B
    part_BP = part(
        ratios.parameters,
        shares.parameters,
        held(ratios.parameters, trained=False),
        (zero_B >= ZeroStage.PARAMETERS) & (ranks > 1),
    )
    graded_BG = part(
        ratios.gradients,
        shares.gradients,
        held(ratios.gradients, trained=True),
        (zero_B >= ZeroStage.GRADIENTS) & (ranks > 1),
    )
    owned_BG = part(ratios.gradients, shares.owned, updated(ratios.gradients), always_B)
    state_BO = part(ratios.optimizer, shares.optimizer, updated(ratios.optimizer), always_B)
    return part_BP, graded_BG, owned_BG, state_BO
