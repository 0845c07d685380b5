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
    M  runs that have to move something
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.phases import Phase
from lightning_mist.tuner.floor_family import StageFloors
from lightning_mist.tuner.placed_runs import Copies, PlacedRuns

_MOVED = ("activations", "gradients", "parameters")

_TOLD_APART = 3
"""Leading binary digits of numbers of microbatches that are told apart."""

_NEXT_TO_NOTHING = 1e-9
"""Share of the bytes that have to be freed which is less than rounding."""


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
        # What takes at least so long with fewer in flight does so with more: of many, fewer numbers are told apart.
        step = 1 << max(0, others.bit_length() - _TOLD_APART)
        return cls(place=place, others=others // step * step, has_gradients=bool(backwards))


def stage_floors(placed: PlacedRuns, memory_limit: float, situation: Situation) -> StageFloors:
    """What a stage takes at least, by layers and devices: the least of any run, in either time by itself.

    Args:
        placed: Runs of layers at its place.
        memory_limit: Bytes of a device.
        situation: What a stage there finds.
    """
    steady_V, reach_V = _least(placed, memory_limit, situation)
    found = StageFloors(layers_V=placed.layers_V, devices_V=placed.devices_V, steady_V=steady_V, reach_V=reach_V)
    return found.within(placed.pace)


def _least(placed: PlacedRuns, memory_limit: float, situation: Situation) -> tuple[FloatArray, FloatArray]:
    """The least seconds of a microbatch, and with what is exposed, by layers and devices; infinite if none fits."""
    if not len(placed):
        return np.empty(0), np.empty(0)
    excess_R = placed.needed_R + situation.others * placed.saved_R - memory_limit
    if situation.has_gradients:
        excess_R += placed.gradients_R
    fits_R = excess_R <= 0
    steady_V = np.minimum.reduceat(np.where(fits_R, placed.steady_R, np.inf), placed.begins_V)
    reach_V = np.minimum.reduceat(np.where(fits_R, placed.reach_R, np.inf), placed.begins_V)
    copies = placed.copies
    if copies is None or not copies.kinds & set(_MOVED):
        return steady_V, reach_V

    def useful(at_M: IntArray, found_M: FloatArray) -> tuple[IntArray, FloatArray]:
        """The runs that may take less than what is known of others."""
        cell_M = placed.cell_R[at_M]
        kept_M = np.maximum(found_M, placed.reach_R[at_M]) < reach_V[cell_M]
        kept_M = (kept_M | (found_M < steady_V[cell_M])) & (found_M <= placed.pace)
        return at_M[kept_M], found_M[kept_M]

    def told(at_M: IntArray, found_M: FloatArray, pairs: slice) -> FloatArray:
        """What some pairs of weights say of runs, and others have said."""
        return np.maximum(found_M, _moved(placed, copies, situation, at_M, excess_R[at_M], pairs))

    def learn(at_M: IntArray, found_M: FloatArray) -> None:
        np.minimum.at(steady_V, placed.cell_R[at_M], found_M)
        np.minimum.at(reach_V, placed.cell_R[at_M], np.maximum(found_M, placed.reach_R[at_M]))

    # Moving is of use only to what is faster than what fits. What one pair of weights says of all runs tells which
    # are the most promising; what these take rules out most others.
    at_M = np.flatnonzero(~fits_R)
    at_M, found_M = useful(at_M, placed.steady_R[at_M])
    if len(at_M):
        at_M, found_M = useful(at_M, told(at_M, found_M, slice(1)))
    if len(at_M):
        best_M = _least_of_each(placed.cell_R[at_M], found_M)
        learn(at_M[best_M], told(at_M[best_M], found_M[best_M], slice(1, None)))
        at_M, found_M = useful(at_M[~best_M], found_M[~best_M])
    for pairs in (slice(1, 2), slice(2, None)):
        if len(at_M):
            at_M, found_M = useful(at_M, told(at_M, found_M, pairs))
    learn(at_M, found_M)
    return steady_V, reach_V


def _least_of_each(cell_M: IntArray, found_M: FloatArray) -> BoolArray:
    """Which of some runs, by cell, take the least seconds of their cell."""
    begins = np.flatnonzero(np.diff(cell_M, prepend=-1))
    least = np.repeat(np.minimum.reduceat(found_M, begins), np.diff(begins, append=len(cell_M)))
    found: BoolArray = found_M <= least
    return found


def _moved(
    placed: PlacedRuns, copies: Copies, situation: Situation, at_M: IntArray, excess_M: FloatArray, pairs: slice
) -> FloatArray:
    """Seconds of a microbatch where something has to be moved, by some pairs of weights; infinite if all is too little.

    The cheapest way to free ``e`` bytes, of kinds ``i`` that free at most ``f_i`` at ``p_i`` seconds per byte, takes

        max_j [p_j e - sum_i f_i max(0, p_j - p_i)].
    """
    activations_M = situation.others * copies.whole_R[at_M] + copies.own_R[at_M]
    gradients_M = copies.free_gradients_R[at_M] * situation.has_gradients
    parameters_M = copies.free_parameters_R[at_M]
    freed_M = activations_M + gradients_M + parameters_M
    wanted_M = np.minimum(excess_M, freed_M)
    loads_WM, all_WM, by_gradients_WM, by_parameters_WM = (
        np.take(values_WR[pairs], at_M, axis=1)
        for values_WR in (placed.loads_WR, copies.activations_WR, copies.gradients_WR, copies.parameters_WR)
    )
    beside_M = wanted_M - activations_M
    by_activations_WM = all_WM / np.where(activations_M > 0, activations_M, np.inf)
    copies_WM = by_activations_WM * wanted_M
    copies_WM -= gradients_M * np.maximum(by_activations_WM - by_gradients_WM, 0.0)
    copies_WM -= parameters_M * np.maximum(by_activations_WM - by_parameters_WM, 0.0)
    ways = (by_gradients_WM, by_parameters_WM, parameters_M), (by_parameters_WM, by_gradients_WM, gradients_M)
    for price_WM, other_WM, freed_by_other_M in ways:
        # Less what activations save, which is something only if that is positive.
        way_WM = np.minimum(price_WM * wanted_M, price_WM * beside_M + all_WM)
        way_WM -= freed_by_other_M * np.maximum(price_WM - other_WM, 0.0)
        np.maximum(copies_WM, way_WM, out=copies_WM)
    found_M = (loads_WM + copies_WM).max(axis=0)
    is_enough_M = freed_M >= excess_M * (1 - _NEXT_TO_NOTHING)
    return np.where(is_enough_M, found_M, np.inf)
