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

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.offload_loads import Beforehand
from lightning_mist.cost.offload_parts import Ratios
from lightning_mist.cost.offload_ranks import RankParts
from lightning_mist.cost.overlap_floor import least_seconds


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
        part_BP, part_BG, owned_part_BG, part_BO: What part of moved state the rank that has most moves; of gradients
            also of what it owns.
        deferring_B: Whether the update waits for the next forward, if it may be done by units at all; 1 or 0.
        parameters_BP, parameters_end_BP: Fetching parameters in a forward; ``_end`` in the first one only.
        again_BP: Fetching them in a backward.
        written_BP: Writing back what an update changed of them.
        gradients_BG: Fetching gradients.
        returned_BG: Writing them back.
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
    part_BP: FloatArray
    part_BG: FloatArray
    owned_part_BG: FloatArray
    part_BO: FloatArray
    deferring_B: FloatArray
    parameters_BP: FloatArray
    parameters_end_BP: FloatArray
    again_BP: FloatArray
    written_BP: FloatArray
    gradients_BG: FloatArray
    returned_BG: FloatArray
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

    def cut(self, begin: int, end: int) -> "CopyFloors":
        """Those of the stages from one to before another, which share memory with these."""
        return CopyFloors(**{name: getattr(self, name)[begin:end] for name in self.__slots__})

    def before(self, row_J: IntArray, place_JX: IntArray) -> Beforehand:
        """What is known of stages with ratios without copies.

        Args:
            row_J: Which stage each is of.
            place_JX: Which ratios of parameters, gradients and optimizer state it has.
        """
        p, g, o = ((row_J, place_J) for place_J in place_JX.T)
        return Beforehand(
            update_K=self.updating_B[row_J],
            reduce_K=self.averaging_B[row_J],
            gather_K=self.giving_B[row_J],
            alone_XK=self.alone_BX[row_J].T,
            parts=RankParts(
                parameters_K=self.part_BP[p],
                gradients_K=self.part_BG[g],
                owned_gradients_K=self.owned_part_BG[g],
                optimizer_K=self.part_BO[o],
            ),
        )

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
        is_deferred_J = (place_JX > 0).any(axis=1) & (self.deferring_B[row_J] > 0)
        away_J, away_end_J, back_J, back_end_J = activations_J * self.away_BX[row_J].T
        alone_J, alone_first_J, alone_backward_J, alone_last_J = self.alone_BX[row_J].T
        computed_J, update_J = self.forward_B[row_J], self.update_B[row_J]
        fetched_J, unshard_J = self.parameters_BP[p], self.unshard_B[row_J]
        end_J = self.unshard_end_B[row_J] + away_end_J
        forward_J = least_seconds(weights, computed_J, unshard_J, fetched_J, away_J) + end_J
        first_J = least_seconds(
            weights,
            computed_J + update_J,
            unshard_J + self.gather_B[row_J],
            fetched_J + self.state_BO[o] + self.stepped_BG[g],
            away_J + self.stored_BO[o] + self.written_BP[p],
        )
        first_J = first_J + end_J + self.gather_end_B[row_J] + self.state_end_BO[o] + self.stepped_end_BG[g]
        first_J = first_J + self.parameters_end_BP[p]
        loads = self.again_BP[p] + self.gradients_BG[g] + back_J, self.returned_BG[g]
        computed_J, network_J = self.backward_B[row_J], self.network_B[row_J]
        end_J = self.network_end_B[row_J] + back_end_J
        backward_J = least_seconds(weights, computed_J, network_J, *loads) + end_J
        last_J = least_seconds(weights, computed_J, network_J + self.reduce_B[row_J], *loads) + end_J
        last_J = last_J + self.reduce_end_B[row_J]
        more_J, later_J = np.maximum(forward_J - alone_J, 0.0), np.maximum(backward_J - alone_backward_J, 0.0)
        hidden_J = np.maximum(alone_first_J - alone_J - update_J, 0.0)
        given_J = self.gather_B[row_J] + self.gather_end_B[row_J]
        once_J = np.where(is_deferred_J, np.maximum(more_J + hidden_J, first_J - alone_J - update_J), more_J + given_J)
        averaged_J = self.exposed_B[row_J] + last_J - alone_last_J
        return more_J + later_J, once_J + np.maximum(later_J, averaged_J)
