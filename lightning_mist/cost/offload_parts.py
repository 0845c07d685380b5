"""What the peaks of stages are made of for every combination of ratios, from each kind of state by itself.

In no situation of a stage do two kinds of state depend on each other but activations and gradients, which the same
working sets count. So a stage is asked about once for every pair of their ratios, and once for every ratio of
parameters and of optimizer state, and the peak of a combination is

    parameters + optimizer state + max(what a pair of ratios leaves, gradients that stay + the optimizer's temporaries)

each with its buffers; of the temporaries it matters only whether anything else that the step needs is moved, and beside
them are the moved parameters of a third unit. All of it is from the same functions as
:func:`lightning_mist.cost.offload.offloaded_needs`.

Array axes
    B  stages
    P  ratios of parameters
    G  ratios of gradients
    O  ratios of optimizer state
    A  ratios of activations
    K  stages with pairs of ratios: of every stage all pairs, those of activations running fastest
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.needs import PeakParts
from lightning_mist.cost.offload import (
    BUFFERS,
    OffloadingModel,
    adds_in_host,
    in_flight,
    largest_trained,
    staying_needs,
    step_bytes,
)
from lightning_mist.cost.offload_shares import Shares
from lightning_mist.cost.phases import Phase
from lightning_mist.plan import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The ratios of each kind of state, ascending."""

    parameters: tuple[float, ...]
    gradients: tuple[float, ...]
    optimizer: tuple[float, ...]
    activations: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many of each there are."""
        return len(self.parameters), len(self.gradients), len(self.optimizer), len(self.activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedShares:
    """What of each kind of state stages have and move with every ratio; axes ``B`` and the ratios of the kind.

    Attributes:
        parameters: Of parameters.
        gradients: Of gradients, shared out from ZeRO-2 on.
        owned: Of gradients whose parameters a rank updates, shared out from ZeRO-1 on.
        optimizer: Of optimizer state, in bytes of the parameters.
    """

    parameters: Shares
    gradients: Shares
    owned: Shares
    optimizer: Shares


def moved_shares(model: OffloadingModel, slot: StageSlot, candidates: StageCandidates, ratios: Ratios) -> MovedShares:
    """What of each kind of state stages have and move with every ratio.

    Args:
        model: The network's memory.
        slot: Their place.
        candidates: The stages.
        ratios: What may be moved.
    """
    zero_B, states, ranks = candidates.zero_stage_K, model.states, slot.shard_degree

    def of(values: tuple[float, ...], since: ZeroStage, *, trained: bool = True) -> Shares:
        return states.of_ratios(candidates, values, ranks, zero_B >= since, trained=trained)

    owned = of(ratios.gradients, ZeroStage.OPTIMIZER)
    return MovedShares(
        parameters=of(ratios.parameters, ZeroStage.PARAMETERS, trained=False),
        gradients=of(ratios.gradients, ZeroStage.GRADIENTS),
        owned=owned,
        optimizer=owned if ratios.optimizer == ratios.gradients else of(ratios.optimizer, ZeroStage.OPTIMIZER),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParts:
    """What peaks of stages are made of, whatever slots they are of.

    Attributes:
        stays: What pairs of ratios leave on the device, buffers of gradients and all that is never moved included.
        beside_BG: What of it is there in the optimizer's step.
        parameters_BP: Parameters that stay, and buffers of others.
        optimizer_BO: The same of optimizer state.
        step_BO: The optimizer's temporaries where neither parameters nor gradients are moved.
        unit_BO: The same where some are: of one unit.
        third_BP: Moved parameters of a third unit, which are there in the step.
        host_parameters_BP: Parameters in host memory.
        host_gradients_BG: Gradients there.
        host_optimizer_BO: Optimizer state there.
        host_activations_K: Activations of one microbatch there.
    """

    stays: PeakParts
    beside_BG: FloatArray
    parameters_BP: FloatArray
    optimizer_BO: FloatArray
    step_BO: FloatArray
    unit_BO: FloatArray
    third_BP: FloatArray
    host_parameters_BP: FloatArray
    host_gradients_BG: FloatArray
    host_optimizer_BO: FloatArray
    host_activations_K: FloatArray

    @classmethod
    def of(
        cls,
        model: OffloadingModel,
        slot: StageSlot,
        candidates: StageCandidates,
        ratios: Ratios,
        shares: "MovedShares | None" = None,
    ) -> "OffloadParts":
        """Those of the stages of one slot.

        Args:
            model: The network's memory.
            slot: Their place.
            candidates: The stages, without ratios.
            ratios: What may be moved.
            shares: What of it is moved, if that is known.
        """
        count, state = len(candidates), model.spec.optimizer.state_bytes_per_parameter_byte
        found = moved_shares(model, slot, candidates, ratios) if shares is None else shares
        whole = model.needs(slot, candidates)
        pairs_VX = np.array([(a, g) for g in ratios.gradients for a in ratios.activations])
        of_K, pair_K = np.divmod(np.arange(count * len(pairs_VX)), len(pairs_VX))
        every = len(ratios.activations)
        # Of the gradients' shares of all stages, which have no axis for activations.
        place_K = np.arange(len(of_K)) // every
        gradients = found.gradients.take(place_K), found.owned.take(place_K)
        stays = staying_needs(model, slot, candidates.take(of_K), whole.take(of_K), (pairs_VX, pair_K), gradients)
        parts = PeakParts.of(stays.without("parameter_bytes", "optimizer_bytes"))
        optimizer, parameters = found.optimizer, found.parameters
        return cls(
            stays=parts,
            beside_BG=found.owned.resident_K - found.owned.single_K + parts.always_K[::every].reshape(count, -1),
            parameters_BP=parameters.resident_K + BUFFERS * parameters.largest_K,
            optimizer_BO=state * (optimizer.resident_K + BUFFERS * optimizer.largest_K),
            step_BO=step_bytes(model, optimizer, largest_trained(whole)[:, None], False),
            unit_BO=step_bytes(model, optimizer, largest_trained(whole)[:, None], True),
            third_BP=parameters.largest_K,
            host_parameters_BP=parameters.moved_K,
            host_gradients_BG=(found.gradients if adds_in_host(slot) else found.owned).moved_K,
            host_optimizer_BO=state * optimizer.moved_K,
            host_activations_K=whole.saved_K[of_K] - stays.saved_K,
        )

    @classmethod
    def joined(cls, items: Sequence["OffloadParts"]) -> "OffloadParts":
        """Those of the stages of all."""
        arrays = {
            name: np.concatenate([getattr(item, name) for item in items]) for name in cls.__slots__ if name != "stays"
        }
        return cls(stays=PeakParts.joined([item.stays for item in items]), **arrays)

    def __len__(self) -> int:
        """Number of stages."""
        return len(self.beside_BG)

    def take(self, index_J: IntArray) -> "OffloadParts":
        """Those of the stages at some indices."""
        pairs = len(self.host_activations_K) // max(1, len(self))
        index_K = (index_J[:, None] * pairs + np.arange(pairs)).reshape(-1)
        arrays = {name: getattr(self, name)[index_J] for name in self.__slots__ if name.endswith(("_BG", "_BP", "_BO"))}
        return OffloadParts(
            stays=self.stays.take(index_K), host_activations_K=self.host_activations_K[index_K], **arrays
        )

    def cut(self, begin: int, end: int) -> "OffloadParts":
        """Those of the stages from one to before another, which share memory with these."""
        pairs = len(self.host_activations_K) // max(1, len(self))
        wide, cut_B = slice(begin * pairs, end * pairs), slice(begin, end)
        arrays = {name: getattr(self, name)[cut_B] for name in self.__slots__ if name.endswith(("_BG", "_BP", "_BO"))}
        return OffloadParts(stays=self.stays.take(wide), host_activations_K=self.host_activations_K[wide], **arrays)

    def beside(self, more_B: FloatArray) -> "OffloadParts":
        """The same beside so many more bytes that are there all the time.

        Args:
            more_B: Bytes, of every stage.
        """
        pairs = len(self.host_activations_K) // max(1, len(self))
        stays = replace(self.stays, always_K=self.stays.always_K + np.repeat(more_B, pairs))
        return replace(self, stays=stays, beside_BG=self.beside_BG + more_B[:, None])

    def peaks(self, phases: Sequence[Phase]) -> FloatArray:
        """Peak bytes of every stage with every combination of ratios; axes ``B``, ``P``, ``G``, ``O``, ``A``."""
        return self.peaks_beside(self.stays.peaks(phases))

    def peaks_beside(self, pairs_K: FloatArray) -> FloatArray:
        """The same where what pairs of ratios leave on the device peaks at so many bytes."""
        pairs_BGA = pairs_K.reshape(*self.beside_BG.shape, -1)
        moves_BPG = (self.host_parameters_BP[:, :, None] > 0) | (self.host_gradients_BG[:, None] > 0)
        step_BPGO = np.where(moves_BPG[..., None], self.unit_BO[:, None, None], self.step_BO[:, None, None])
        step_BPGO += (self.third_BP[:, :, None] + self.beside_BG[:, None])[..., None]
        rest_BPGOA = np.maximum(pairs_BGA[:, None, :, None], step_BPGO[..., None])
        held_BPO = self.parameters_BP[:, :, None] + self.optimizer_BO[:, None]
        result_BPGOA: FloatArray = rest_BPGOA + held_BPO[:, :, None, :, None]
        return result_BPGOA

    def host_bytes(self, phases: Sequence[Phase]) -> FloatArray:
        """Pinned host memory of the same."""
        return self.host_bytes_beside(in_flight(phases) * self.host_activations_K)

    def host_bytes_beside(self, activations_K: FloatArray) -> FloatArray:
        """The same where pairs of ratios leave so many bytes of activations there."""
        moved_BGA = activations_K.reshape(*self.beside_BG.shape, -1)
        states_BGO = self.host_gradients_BG[:, :, None] + self.host_optimizer_BO[:, None, :]
        rest_BGOA = moved_BGA[:, :, None, :] + states_BGO[..., None]
        result_BPGOA: FloatArray = self.host_parameters_BP[:, :, None, None, None] + rest_BGOA[:, None]
        return result_BPGOA

    def most_host_bytes(self, activations_K: FloatArray) -> float:
        """At least the largest of these."""
        moved_B = activations_K.reshape(len(self), -1).max(axis=1, initial=0.0)
        states_B = self.host_gradients_BG.max(axis=1) + self.host_optimizer_BO.max(axis=1)
        return float((self.host_parameters_BP.max(axis=1) + (moved_B + states_B)).max(initial=0.0))
