"""What candidates may offload: every combination of ratios that fits and offloads no more than it has to.

If a ratio rises, no unit copies less: so neither ``t`` nor ``t + d`` fall, as these are sums of larger ones of what
units take with and without copies. So of the combinations that fit one is needed only if none with smaller ratios
fits. Three things are not compared so:

* Candidates whose update waits for the next forward, which those are that offload parameters, gradients or optimizer
  state, with those whose update does not.
* Different ratios of what ZeRO deals out over ranks: with a larger ratio other parameters are offloaded, and the rank
  that offloads most may offload less than before.
* Different ratios where parameters are tied and a larger ratio offloads a larger parameter of a unit instead of one
  that several units fetch. Of all others a larger ratio offloads as many bytes of every unit or more: the largest that
  fits comes first, so that what a smaller ratio offloads instead of it is less.

Where a machine's corrections multiply some terms and not others nothing is left out.

Array axes
    P  candidates of a table as stages may have them
    B  those that are tried with offload
    C  combinations of ratios, nothing offloaded first
    J  candidates with ratios
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lightning_mist.cost import CostModel, StageSlot, profiles_of
from lightning_mist.cost.inputs import ArrayRecord, BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import OffloadParts
from lightning_mist.plan import ZeroStage
from lightning_mist.tuner.candidates.offload_ratios import RatioGrid
from lightning_mist.tuner.candidates.stage_points import StagePoints
from lightning_mist.tuner.space import OFFLOADED

PAIRS_AT_ONCE = 1 << 14
"""Candidates with pairs of ratios whose bytes are worked out together: fast, and some megabytes."""

PEAKS_AT_ONCE = 1 << 19
"""Peaks of candidates with ratios that are looked at together, of 8 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasible(ArrayRecord):
    """Candidates with ratios that fit: which of the stages' they are of, which combination they have, peak bytes."""

    AXIS: ClassVar[str] = "J"

    point_J: IntArray
    combination_J: IntArray
    peak_J: FloatArray

    @classmethod
    def none(cls) -> "Feasible":
        """No candidates."""
        none_J = np.empty(0, dtype=np.int64)
        return cls(point_J=none_J, combination_J=none_J, peak_J=np.empty(0))


def ordered(model: CostModel, slot: StageSlot, zero_stage: int, grid: RatioGrid) -> tuple[str, ...]:
    """Kinds of state of which a larger ratio is never faster."""
    if any(profile.corrections for profile in profiles_of(model)):
        return ()
    if model.memory(slot).states.displaces(grid.values):
        return ("activations",)
    if slot.shard_degree == 1 or zero_stage == ZeroStage.NONE:
        return OFFLOADED
    return ("activations",) if zero_stage >= ZeroStage.PARAMETERS else ("parameters", "activations")


def feasible(
    model: CostModel, grid: RatioGrid, points: StagePoints, point_B: IntArray, limits: tuple[float, float]
) -> Iterator[Feasible]:
    """What some candidates of the stages of a table may offload, block by block.

    Args:
        limits: Bytes that a device may use, and of host memory.
    """
    table, shape_B = points.table, points.table.shape_K[points.index_P[point_B]]
    at_once = max(1, PAIRS_AT_ONCE // (len(grid.each.activations) * len(grid.each.gradients)))
    most = max(1, PEAKS_AT_ONCE // len(grid))
    for shape in np.unique(shape_B).tolist():
        slot, some_B = table.slots[shape], point_B[shape_B == shape]
        # Stages share candidates, of which what peaks are made of does not depend on the stage.
        index_U, row_B = np.unique(points.index_P[some_B], return_inverse=True)
        for begin in range(0, len(index_U), at_once):
            candidates = table.candidates(index_U[begin : begin + at_once])
            parts = OffloadParts.of(model.memory(slot), slot, candidates, grid.each)
            inside_B = np.flatnonzero((row_B >= begin) & (row_B < begin + at_once))
            for first in range(0, len(inside_B), most):
                at_B = inside_B[first : first + most]
                peak_BC, fits_BC = _fitting(points, some_B[at_B], parts, row_B[at_B] - begin, limits)
                fits_BC = _minimal(model, grid, slot, fits_BC, table.zero_stage_K[index_U[row_B[at_B]]])
                of_J, combination_J = np.nonzero(fits_BC)
                yield Feasible(
                    point_J=some_B[at_B[of_J]], combination_J=combination_J, peak_J=peak_BC[of_J, combination_J]
                )


def _fitting(
    points: StagePoints, point_B: IntArray, parts: OffloadParts, row_B: IntArray, limits: tuple[float, float]
) -> tuple[FloatArray, BoolArray]:
    """Peaks of candidates with every combination of ratios, and whether they fit."""
    peaks, fits, begin = [], [], 0
    for stage, end in zip(points.stages, points.ends(point_B), strict=True):
        if end > begin:
            some = parts.take(row_B[begin:end])
            peak_BC = some.peaks(stage.phases).reshape(end - begin, -1)
            fits_BC = peak_BC <= limits[0]
            if np.isfinite(limits[1]):
                fits_BC &= some.host_bytes(stage.phases).reshape(end - begin, -1) <= limits[1]
            peaks.append(peak_BC)
            fits.append(fits_BC)
        begin = end
    return np.concatenate(peaks), np.concatenate(fits)


def _minimal(model: CostModel, grid: RatioGrid, slot: StageSlot, fits_BC: BoolArray, zero_B: IntArray) -> BoolArray:
    """Of the combinations of candidates at one place that fit, those that offload no more than they have to."""
    found_BC = np.zeros_like(fits_BC)
    for zero_stage in np.unique(zero_B).tolist():
        at_B = np.flatnonzero(zero_B == zero_stage)
        found_BC[at_B] = grid.minimal(fits_BC[at_B], ordered(model, slot, zero_stage, grid))
    return found_BC
