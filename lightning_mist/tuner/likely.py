"""What pipelines take before any of them is solved: at least, and probably.

Array axes
    N  arrangements of devices
    R  regions
"""

from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.past import Precedent
from lightning_mist.tuner.space import Space

GUESSED = 1.15
"""Multiple of the step seconds of equal stages that a plan is assumed to take first: a little more than the best takes,
whose stages differ, and whose edges are longer than what the estimate counts."""


LIKE = 1.02
"""Multiple of the step seconds of a pipeline found for an earlier question that one like it probably stays below."""


def quick_bounds(intra: IntraStage, space: Space) -> dict[tuple[int, int], float]:
    """Step seconds that no plan of a pipeline goes below, whatever memory it needs.

    Every region takes at least its least time over all numbers of devices that a stage may have, and all devices
    together at least its least time times devices. Every stage has a layer: with ``r`` the least seconds times devices
    that any layer takes, stages of ``n_i`` devices take at least ``sum_i r / n_i >= r S^2 / N`` together.
    """
    region_seconds: dict[int, tuple[IntArray, FloatArray]] = {}
    result = {}
    for num_stages, num_microbatches in space.pipelines():
        if num_microbatches not in region_seconds:
            region_seconds[num_microbatches] = _region_seconds(intra, space, num_microbatches)
        devices_N, region_NR = region_seconds[num_microbatches]
        most, least = space.world_size - num_stages + 1, space.world_size if num_stages == 1 else 1
        inside_N = (devices_N >= least) & (devices_N <= most)
        region_NR, taken_R = region_NR[inside_N], (region_NR * devices_N[:, None])[inside_N].min(axis=0)
        slowest = float(taken_R.sum()) / space.world_size
        total = float(region_NR.min(axis=0).sum())
        layer = float(taken_R[1 : space.num_layers + 1].min(initial=np.inf))
        stages = layer * num_stages**2 / space.world_size if space.num_layers else 0.0
        result[num_stages, num_microbatches] = (num_microbatches - 1) * slowest + max(total, slowest, stages)
    return result


def _region_seconds(intra: IntraStage, space: Space, num_microbatches: int) -> tuple[IntArray, FloatArray]:
    """The devices of every arrangement, and what every region takes on them."""
    shapes = space.shapes(num_microbatches)
    seconds = [
        intra.model.region_seconds(space.rows(num_microbatches, shape.data), shape.tensor, shape.sequence)
        for shape in shapes
    ]
    return np.array([shape.devices for shape in shapes]), np.stack([s.forward_R + s.backward_R for s in seconds])


def likely_seconds(
    intra: IntraStage,
    lower: Mapping[tuple[int, int], float],
    precedents: Mapping[int, Precedent] = MappingProxyType({}),
    deadline: float = np.inf,
) -> float:
    """Step seconds that the best pipeline probably stays below; infinite if none fits.

    They are those of what was found for an earlier question, else of a pipeline of equal stages.

    Args:
        intra: Evaluates stages.
        lower: By numbers of stages and of microbatches what no plan goes below.
        precedents: By number of stages a pipeline that was found for an earlier question.
        deadline: Value of ``perf_counter()`` at which to stop.
    """
    like = (item.seconds for count, item in precedents.items() if (count, item.num_microbatches) in lower)
    found = min(like, default=np.inf) * LIKE
    if found < np.inf:
        return found
    for key in sorted(lower, key=lambda item: (lower[item], item)):
        if lower[key] >= found or perf_counter() > deadline:
            break
        found = min(found, intra.rough_seconds(*key) * GUESSED)
    return found
