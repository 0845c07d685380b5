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

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.phases import Phase
from lightning_mist.tuner.floor_family import StageFloors
from lightning_mist.tuner.placed_runs import PlacedRuns

_MOVED = ("activations", "gradients", "parameters")

_NEXT_TO_NOTHING = 1e-9
"""Share of the bytes that have to be freed which is less than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the floors of a stage depend on, of where it is in its pipeline.

    Attributes:
        place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
        others: Other microbatches that are in flight around a backward.
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
        return cls(place=place, others=others, has_gradients=bool(backwards))


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
    if not placed.kinds & set(_MOVED):
        return steady_V, reach_V
    # Moving is of use only to what is faster than what fits.
    faster_R = (placed.steady_R < steady_V[placed.cell_R]) | (placed.reach_R < reach_V[placed.cell_R])
    at_M = np.flatnonzero(faster_R & ~fits_R)
    # What one pair of weights says of all runs rules most of them out.
    for pairs in (slice(1), slice(None)):
        if not len(at_M):
            break
        found_M = _moved(placed, situation, at_M, excess_R[at_M], pairs)
        least_M = np.maximum(found_M, placed.reach_R[at_M])
        cell_M = placed.cell_R[at_M]
        kept_M = (found_M <= placed.pace) & ((found_M < steady_V[cell_M]) | (least_M < reach_V[cell_M]))
        at_M, found_M, least_M, cell_M = at_M[kept_M], found_M[kept_M], least_M[kept_M], cell_M[kept_M]
    else:
        np.minimum.at(steady_V, cell_M, found_M)
        np.minimum.at(reach_V, cell_M, least_M)
    return steady_V, reach_V


def _moved(placed: PlacedRuns, situation: Situation, at_M: IntArray, excess_M: FloatArray, pairs: slice) -> FloatArray:
    """Seconds of a microbatch where something has to be moved, by some pairs of weights; infinite if all is too little.

    The cheapest way to free ``e`` bytes, of kinds ``i`` that free at most ``f_i`` at ``p_i`` seconds per byte, takes

        max_j [p_j e - sum_i f_i max(0, p_j - p_i)].
    """
    activations_M = situation.others * placed.whole_R[at_M] + placed.own_R[at_M]
    gradients_M = placed.free_gradients_R[at_M] * situation.has_gradients
    parameters_M = placed.free_parameters_R[at_M]
    freed_M = activations_M + gradients_M + parameters_M
    wanted_M = np.minimum(excess_M, freed_M)
    loads_WM, all_WM = placed.loads_WR[pairs, at_M], placed.activations_WR[pairs, at_M]
    by_gradients_WM, by_parameters_WM = placed.gradients_WR[pairs, at_M], placed.parameters_WR[pairs, at_M]
    by_activations_WM = all_WM / np.where(activations_M > 0, activations_M, np.inf)
    copies_WM = by_activations_WM * wanted_M
    copies_WM -= gradients_M * np.maximum(by_activations_WM - by_gradients_WM, 0.0)
    copies_WM -= parameters_M * np.maximum(by_activations_WM - by_parameters_WM, 0.0)
    ways = (by_gradients_WM, by_parameters_WM, parameters_M), (by_parameters_WM, by_gradients_WM, gradients_M)
    for price_WM, other_WM, freed_by_other_M in ways:
        way_WM = price_WM * wanted_M
        way_WM -= np.maximum(price_WM * activations_M - all_WM, 0.0)
        way_WM -= freed_by_other_M * np.maximum(price_WM - other_WM, 0.0)
        np.maximum(copies_WM, way_WM, out=copies_WM)
    found_M = (loads_WM + copies_WM).max(axis=0)
    found_M = np.maximum(found_M, placed.steady_R[at_M])
    is_enough_M = freed_M >= excess_M * (1 - _NEXT_TO_NOTHING)
    return np.where(is_enough_M, found_M, np.inf)
