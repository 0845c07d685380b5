"""What the peaks of stages are made of for every combination of ratios, from each kind of state by itself.

At no moment of a batch do two kinds of state depend on each other but activations and gradients, which the same
working sets count. So a stage is asked about once for every pair of their ratios, and once for every ratio of
parameters and of optimizer state, and the peak of a combination is

    parameters + optimizer state + max(what a pair of ratios leaves, gradients that stay + the optimizer's temporaries)

each with its buffers; of the temporaries it matters only whether anything else that the step needs is offloaded, and
beside them are the offloaded parameters of a third unit. All of it is from the same functions as
:func:`lightning_mist.cost.memory.offload_bytes.offloaded_needs`.

Array axes
    S  stages
    C  ratios of parameters, of gradients, of optimizer state, of what layers keep, in this order
    K  stages with pairs of ratios: of every stage all pairs, those of what layers keep running fastest
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray, StageCandidates, StageSlot
from lightning_mist.cost.memory.memory_model import ResidentMemory
from lightning_mist.cost.memory.moments import Moments, in_flight
from lightning_mist.cost.memory.offload_bytes import (
    BUFFERS,
    adds_in_host,
    parameter_buffers,
    resident_needs,
    step_bytes,
    unjoined,
)
from lightning_mist.cost.memory.offload_shares import Shares
from lightning_mist.cost.memory.stage_bytes import PeakParts, most_of
from lightning_mist.plan import ZeroStage


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
        resident = resident.without("parameter_bytes", "optimizer_bytes")
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
