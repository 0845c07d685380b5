"""Sums of loads of stages at one place, of which :mod:`lightning_mist.cost.offload_floors` makes floors.

Array axes
    B  stages
    P, G, O  ratios of parameters, gradients, optimizer state
    X  ratios of one of them
    R  regions
    F  rows of gradients that are reduced, by where stages begin
"""

from typing import TypeAlias

import numpy as np

from lightning_mist.cost.beside_copies import BesideCopies
from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.offload_floors import CopyFloors
from lightning_mist.cost.offload_parts import MovedShares, Ratios, moved_shares
from lightning_mist.cost.offload_ranks import defers_K
from lightning_mist.cost.offload_shares import Shares
from lightning_mist.cost.regions import covered
from lightning_mist.cost.sums import prefix_sums
from lightning_mist.plan import ZeroStage


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
        return self.within(prefix_sums(values_R), begin_B, end_B, row_B)

    def within(self, sums: FloatArray, begin_B: IntArray, end_B: IntArray, row_B: IntArray | None = None) -> FloatArray:
        """The same of what all units before each have together."""
        end_B = np.maximum(begin_B, end_B)
        if sums.ndim == 1:
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

    states, state = memory.states, memory.spec.optimizer.state_bytes_per_parameter_byte
    (whole_XR, whole), (_, changed) = (states.unit_sums(ratios.parameters, of) for of in ("parameters", "changed"))
    graded_XR, graded = states.unit_sums(ratios.gradients, "trained")
    state_XR, stored = states.unit_sums(ratios.optimizer, "trained", state)
    part_BP, graded_BG, owned_BG, state_BO = parts
    again = 1.0 if slot.num_microbatches > 1 else 0.0
    costs = memory.costs(slot.rows, slot.context_parallel_degree)
    saved_R, kept_R = (values_R * _is_layer(len(values_R)) for values_R in (costs.saved_R, costs.checkpointed_saved_R))
    away_B = sums.between(saved_R, low_B, last_B)
    away_B = away_B + sums.between(kept_R - saved_R, sums.first_B, np.minimum(sums.middle_B, last_B))
    is_again_B = (last_B >= sums.first_B) & (last_B < sums.middle_B)
    away_end_B = np.where(is_again_B, kept_R[last_B], saved_R[last_B])
    return {
        "part_BP": part_BP,
        "part_BG": graded_BG,
        "owned_part_BG": owned_BG,
        "part_BO": state_BO,
        "deferring_B": defers_K(memory.spec, [slot], np.zeros_like(low_B), sums.candidates).astype(np.float64),
        "parameters_BP": part_BP * sums.within(whole, low_B + 2, high_B) / to_device,
        "parameters_end_BP": part_BP * whole_XR[:, low_B].T / to_device,
        "again_BP": part_BP * sums.within(whole, low_B, last_B - 1) / to_device,
        "written_BP": part_BP * sums.within(changed, low_B, high_B) / to_host,
        "gradients_BG": again * graded_BG * sums.within(graded, low_B, high_B) / to_device,
        "returned_BG": graded_BG * sums.within(graded, low_B + 1, high_B) / to_host,
        "stepped_BG": owned_BG * sums.within(graded, low_B + 1, high_B) / to_device,
        "stepped_end_BG": owned_BG * graded_XR[:, low_B].T / to_device,
        "state_BO": state_BO * sums.within(stored, low_B + 1, high_B) / to_device,
        "state_end_BO": state_BO * state_XR[:, low_B].T / to_device,
        "stored_BO": state_BO * sums.within(stored, low_B, high_B) / to_host,
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
        return sums.within(memory.states.unit_sums(values, "trained")[1], sums.low_B, sums.high_B)

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
