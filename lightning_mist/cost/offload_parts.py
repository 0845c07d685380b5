"""What the peaks of stages are made of for every combination of ratios, from each kind of state by itself.

In no situation of a stage do two kinds of state depend on each other but activations and gradients, which the same
working sets count. So a stage is asked about once for every pair of their ratios, and once for every ratio of
parameters and of optimizer state, and the peak of a combination is

    parameters + optimizer state + max(what a pair of ratios leaves, gradients that stay + the optimizer's temporaries)

each with its buffers; all of it from the same functions as :func:`lightning_mist.cost.offload.offloaded_needs`.

Array axes
    B  stages
    P  ratios of parameters
    G  ratios of gradients
    O  ratios of optimizer state
    A  ratios of activations
    K  stages with pairs of ratios: of every stage all pairs, those of activations running fastest
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.needs import PeakParts
from lightning_mist.cost.offload import (
    BUFFERS,
    OffloadingModel,
    gradient_shares,
    in_flight,
    largest_trained,
    optimizer_shares,
    parameter_shares,
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
class OffloadParts:
    """What peaks of stages are made of, whatever slots they are of.

    Attributes:
        stays: What pairs of ratios leave on the device, buffers of gradients and all that is never moved included.
        beside_BG: What of it is there in the optimizer's step.
        parameters_BP: Parameters that stay, and buffers of others.
        optimizer_BO: The same of optimizer state.
        step_BO: The optimizer's temporaries.
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
    host_parameters_BP: FloatArray
    host_gradients_BG: FloatArray
    host_optimizer_BO: FloatArray
    host_activations_K: FloatArray

    @classmethod
    def of(cls, model: OffloadingModel, slot: StageSlot, candidates: StageCandidates, ratios: Ratios) -> "OffloadParts":
        """Those of the stages of one slot.

        Args:
            model: The network's memory.
            slot: Their place.
            candidates: The stages, without ratios.
            ratios: What may be moved.
        """
        count, state = len(candidates), model.spec.optimizer.state_bytes_per_parameter_byte
        whole = model.needs(slot, candidates)
        pairs_VX = np.array([(a, g) for g in ratios.gradients for a in ratios.activations])
        of_K = np.repeat(np.arange(count), len(pairs_VX))
        pair_K = np.tile(np.arange(len(pairs_VX)), count)
        stays = staying_needs(model, slot, candidates.take(of_K), whole.take(of_K), pairs_VX, pair_K)
        parts = PeakParts.of(stays.without("parameter_bytes", "optimizer_bytes"))
        every = len(ratios.activations)
        owned_K = np.asarray(dict(stays.update)["optimizer step"]["gradient_bytes"])

        def shares(of: _SharesOf, values: Sequence[float]) -> Shares:
            return of(candidates.take(np.repeat(np.arange(count), len(values))), np.tile(values, count))

        def square(values_K: FloatArray) -> FloatArray:
            return values_K.reshape(count, -1)

        parameters = shares(lambda some, ratio_K: parameter_shares(model, slot, some, ratio_K), ratios.parameters)
        gradients = shares(
            lambda some, ratio_K: gradient_shares(model, slot, some, ratio_K, ZeroStage.GRADIENTS), ratios.gradients
        )
        optimizer = shares(lambda some, ratio_K: optimizer_shares(model, slot, some, ratio_K), ratios.optimizer)
        largest_K = np.repeat(largest_trained(whole), len(ratios.optimizer))
        return cls(
            stays=parts,
            beside_BG=square((owned_K + parts.always_K)[::every]),
            parameters_BP=square(parameters.resident_K + BUFFERS * parameters.largest_K),
            optimizer_BO=square(state * (optimizer.resident_K + BUFFERS * optimizer.largest_K)),
            step_BO=square(step_bytes(model, optimizer, largest_K)),
            host_parameters_BP=square(parameters.moved_K),
            host_gradients_BG=square(gradients.moved_K),
            host_optimizer_BO=square(state * optimizer.moved_K),
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
        pairs_BGA = self.stays.peaks(phases).reshape(*self.beside_BG.shape, -1)
        step_BGO = self.beside_BG[:, :, None] + self.step_BO[:, None, :]
        rest_BGOA = np.maximum(pairs_BGA[:, :, None, :], step_BGO[..., None]) + self.optimizer_BO[:, None, :, None]
        result_BPGOA: FloatArray = self.parameters_BP[:, :, None, None, None] + rest_BGOA[:, None]
        return result_BPGOA

    def host_bytes(self, phases: Sequence[Phase]) -> FloatArray:
        """Pinned host memory of the same."""
        moved_BGA = in_flight(phases) * self.host_activations_K.reshape(*self.beside_BG.shape, -1)
        states_BGO = self.host_gradients_BG[:, :, None] + self.host_optimizer_BO[:, None, :]
        rest_BGOA = moved_BGA[:, :, None, :] + states_BGO[..., None]
        result_BPGOA: FloatArray = self.host_parameters_BP[:, :, None, None, None] + rest_BGOA[:, None]
        return result_BPGOA


_SharesOf = Callable[[StageCandidates, FloatArray], Shares]
