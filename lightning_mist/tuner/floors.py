"""What a stage takes at least where it has to fit, from what runs of layers take and hold at least.

What is counted of its memory is what is there around a backward: parameters, optimizer state and gradients, what the
other microbatches in flight keep, and the own one's working set. What does not fit has to be moved to host memory in
the cheapest way that there could be. To free a byte

* by *activations*, a microbatch's are copied away beside a forward and back beside a backward; as many are freed as
  microbatches are in flight, but for the last two layers' of the own one. Those of the last layer of a stage without
  the tail are copied while nothing else is done;
* by *gradients*, they are fetched and written back in every backward;
* by *parameters*, they are fetched in every forward and backward.

Of each of the latter two, and of optimizer state, two buffers stay on the device, each as large as the largest part of
any unit: of what ``n`` units move, ``2 / n`` at least. Copies of optimizer state count for nothing.

All loads of a forward together take at least what their weights say (:mod:`lightning_mist.tuner.load_weights`), and so
do those of a backward; both may be weighted differently, each in every way.

What neither depends on how many microbatches are in flight nor on the limit of memory is worked out once per place of a
pipeline, for the runs that are fast enough (:mod:`lightning_mist.tuner.placed_runs`).

Array axes
    R, V, W  as there
    H  situations
    F  numbers of layers and devices in every situation, one after the other
    M  runs in situations where they have to move something
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import Phase
from lightning_mist.tuner.floor_family import StageFloors
from lightning_mist.tuner.placed_runs import Copies, PlacedRuns

_TOLD_APART = 3
"""Leading binary digits of numbers of microbatches that are told apart."""

_AT_ONCE = 1 << 16
"""Runs, of all situations, that are looked at together."""

_NEXT_TO_NOTHING = 1e-9
"""Share of the bytes that have to be freed which is less than rounding."""

_PAIRS = slice(1), slice(1, 2), slice(2, None)
"""Pairs of weights that are looked at together, one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the floors of a stage depend on, of where it is in its pipeline.

    Attributes:
        place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
        others: Other microbatches that are in flight around a backward, at least.
        has_gradients: Whether there are gradients already.
    """

    place: str
    others: int
    has_gradients: bool

    @classmethod
    def of(cls, place: str, phases: Sequence[Phase]) -> "Situation":
        """The situation around the backward that finds most.

        Args:
            place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
            phases: The situations of the slot.
        """
        # Gradients are there in all backwards but the first.
        backwards = [phase.others for phase in phases if phase.kind == "backward"]
        others = max(backwards or [phase.others for phase in phases if phase.kind == "first backward"])
        return cls(place=place, others=_told_apart(others), has_gradients=bool(backwards))

    @classmethod
    def in_1f1b(cls, place: str, behind: int, num_microbatches: int) -> "Situation":
        """The same under 1F1B, without a look at the schedule.

        Args:
            place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
            behind: Stages behind.
            num_microbatches: Microbatches per batch.
        """
        # A forward for every stage behind runs before the first backward; what that let go of, another takes the place
        # of, if there is one more.
        others = min(behind, max(0, num_microbatches - 2))
        return cls(place=place, others=_told_apart(others), has_gradients=num_microbatches > 1)


def _told_apart(others: int) -> int:
    """A number that is not more, of which there are few; what takes at least so long with fewer does with more."""
    step = 1 << max(0, others.bit_length() - _TOLD_APART)
    return others // step * step


def stage_floors(
    placed: PlacedRuns, memory_limit: float, situations: Sequence[Situation], pace: float = np.inf
) -> list[StageFloors]:
    """What stages take at least, by layers and devices: the least of any run, in either time by itself.

    Args:
        placed: Runs of layers at their place.
        memory_limit: Bytes of a device.
        situations: What stages there find; they are looked at together, which is faster.
        pace: The most seconds of a microbatch that are of interest, if that is less than the pace of the runs.
    """
    pace = min(pace, placed.pace)
    found, most = [], max(1, _AT_ONCE // max(1, len(placed)))
    for begin in range(0, len(situations), most):
        some = _Asked(placed, memory_limit, situations[begin : begin + most], pace)
        found += [
            StageFloors(layers_V=placed.layers_V, devices_V=placed.devices_V, steady_V=steady_V, reach_V=reach_V)
            for steady_V, reach_V in zip(*some.least(), strict=True)
        ]
    return [item.within(pace) for item in found]


class _Asked:
    """Runs at a place in several situations.

    Args:
        placed: The runs.
        memory_limit: Bytes of a device.
        situations: The situations.
        pace: The most seconds of a microbatch.
    """

    def __init__(self, placed: PlacedRuns, memory_limit: float, situations: Sequence[Situation], pace: float) -> None:
        self.placed, self.pace = placed, pace
        self.others_H = np.array([float(item.others) for item in situations])
        self.gradients_H = np.array([float(item.has_gradients) for item in situations])
        self.excess_HR = (placed.needed_R - memory_limit) + self.others_H[:, None] * placed.saved_R
        self.excess_HR += self.gradients_H[:, None] * placed.gradients_R
        # By layers and devices, too, one situation after the other.
        self.steady_F = self.reach_F = np.empty(0)

    def least(self) -> tuple[FloatArray, FloatArray]:
        """The least seconds of a microbatch, and with what is exposed, with axes ``HV``; infinite if none fits."""
        placed, shape = self.placed, (len(self.others_H), len(self.placed.layers_V))
        if not len(placed):
            return np.empty(shape), np.empty(shape)
        fits_HR = self.excess_HR <= 0
        steady_HV, reach_HV = (
            np.minimum.reduceat(np.where(fits_HR, values_R, np.inf), placed.begins_V, axis=1)
            for values_R in (placed.steady_R, placed.reach_R)
        )
        self.steady_F, self.reach_F = steady_HV.ravel(), reach_HV.ravel()
        if placed.copies is not None and placed.copies.is_any:
            self._move(~fits_HR & (placed.steady_R <= self.pace), placed.copies)
        return self.steady_F.reshape(shape), self.reach_F.reshape(shape)

    def _move(self, lacks_HR: BoolArray, copies: Copies) -> None:
        """Look at what has to be moved by runs that do not fit.

        Moving is of use only to what is faster than what fits: what one pair of weights rules out needs no other.
        """
        in_M, at_M = np.nonzero(lacks_HR)
        lacking = self._useful(_Lacking(in_M=in_M, at_M=at_M, found_M=self.placed.steady_R[at_M]))
        for pairs in _PAIRS:
            lacking = self._useful(self._told(lacking, copies, pairs))
        self._learn(lacking)

    def _cells(self, lacking: "_Lacking") -> IntArray:
        cells_M: IntArray = lacking.in_M * len(self.placed.layers_V) + self.placed.cell_R[lacking.at_M]
        return cells_M

    def _useful(self, lacking: "_Lacking") -> "_Lacking":
        """The runs that may take less than what is known of others."""
        cell_M, found_M = self._cells(lacking), lacking.found_M
        kept_M = np.maximum(found_M, self.placed.reach_R[lacking.at_M]) < self.reach_F[cell_M]
        return lacking.take((kept_M | (found_M < self.steady_F[cell_M])) & (found_M <= self.pace))

    def _learn(self, lacking: "_Lacking") -> None:
        cell_M, found_M = self._cells(lacking), lacking.found_M
        np.minimum.at(self.steady_F, cell_M, found_M)
        np.minimum.at(self.reach_F, cell_M, np.maximum(found_M, self.placed.reach_R[lacking.at_M]))

    def _told(self, lacking: "_Lacking", copies: Copies, pairs: slice) -> "_Lacking":
        """The same with what some pairs of weights say; infinite if moving everything is too little.

        The cheapest way to free ``e`` bytes, of kinds ``i`` that free at most ``f_i`` at ``p_i`` seconds per byte,
        takes

            max_j [p_j e - sum_i f_i max(0, p_j - p_i)].
        """
        in_M, at_M = lacking.in_M, lacking.at_M
        excess_M = self.excess_HR[in_M, at_M]
        activations_M = self.others_H[in_M] * copies.whole_R[at_M] + copies.own_R[at_M]
        gradients_M = copies.free_gradients_R[at_M] * self.gradients_H[in_M]
        parameters_M = copies.free_parameters_R[at_M]
        loads_WM, all_WM, by_gradients_WM, by_parameters_WM = (
            np.take(values_WR[pairs], at_M, axis=1)
            for values_WR in (self.placed.loads_WR, copies.activations_WR, copies.gradients_WR, copies.parameters_WR)
        )
        by_activations_WM = all_WM / np.where(activations_M > 0, activations_M, np.inf)
        freed_M = activations_M + gradients_M + parameters_M
        kinds = (by_activations_WM, activations_M), (by_gradients_WM, gradients_M), (by_parameters_WM, parameters_M)
        copies_WM = _cheapest(kinds, np.minimum(excess_M, freed_M))
        found_M = np.maximum((loads_WM + copies_WM).max(axis=0), lacking.found_M)
        is_enough_M = freed_M >= excess_M * (1 - _NEXT_TO_NOTHING)
        return _Lacking(in_M=in_M, at_M=at_M, found_M=np.where(is_enough_M, found_M, np.inf))


def _cheapest(kinds: Sequence[tuple[FloatArray, FloatArray]], wanted_M: FloatArray) -> FloatArray:
    """Least weighted seconds in which some bytes are freed, of kinds that take so long per byte and free so many."""
    found_WM = np.zeros(kinds[0][0].shape)
    for price_WM, _ in kinds:
        way_WM = price_WM * wanted_M
        for other_WM, freed_M in kinds:
            if other_WM is not price_WM:
                way_WM -= freed_M * np.maximum(price_WM - other_WM, 0.0)
        np.maximum(found_WM, way_WM, out=found_WM)
    return found_WM


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lacking:
    """Runs that have to move something.

    Attributes:
        in_M: The situation of each.
        at_M: The run.
        found_M: Seconds of a microbatch that it takes at least.
    """

    in_M: IntArray
    at_M: IntArray
    found_M: FloatArray

    def take(self, kept_M: BoolArray) -> "_Lacking":
        """Those where a mask is true."""
        return _Lacking(in_M=self.in_M[kept_M], at_M=self.at_M[kept_M], found_M=self.found_M[kept_M])
