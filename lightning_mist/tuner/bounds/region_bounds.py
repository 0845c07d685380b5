"""What pipelines take at least, before any of them is solved.

Array axes
    N  arrangements of devices
    R  regions
"""

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.tuner.candidates import IntraStage
from lightning_mist.tuner.space import Space


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
