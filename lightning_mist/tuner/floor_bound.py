"""Step seconds that no pipeline of a family goes below, by what its stages take at least.

With ``G`` microbatches a pipeline of stages that take ``t`` seconds takes at least ``(G - 1) max t + sum t``. One pass
tells the least sum with every stage within a pace, another the least pace of any pipeline, both for every number of
stages; where that does not say enough, paces are halved as in :mod:`lightning_mist.tuner.bound`.

Array axes
    C  numbers of stages
    K  paces
"""

import heapq
from time import perf_counter

import numpy as np

from lightning_mist.cost.inputs import FloatArray
from lightning_mist.tuner.floor_family import FloorFamily, FloorWalks
from lightning_mist.tuner.problem import PRECISION


def floor_bound(family: FloorFamily, below: float, deadline: float = np.inf, enough: float = np.inf) -> float:
    """Step seconds that no pipeline of a family goes below, as far as they are less than ``below``.

    Args:
        family: The pipelines.
        below: Seconds from which on it does not matter; finite.
        deadline: Value of ``perf_counter()`` at which to stop with what has been found.
        enough: Seconds from which on it does not matter much.
    """
    walks, others = FloorWalks(family, below), family.num_microbatches - 1
    # A pipeline takes at least G times the steady time of any of its stages.
    paces_K = walks.paces(below / family.num_microbatches)
    walk = walks.walk(float(paces_K[-1])) if len(paces_K) else None
    if walk is None:
        return below
    fastest_C = walks.fastest(walk)

    def least_of(begin: int, sums_C: FloatArray) -> float:
        """What pipelines with some sums take at least that are no faster than a pace."""
        there_C = sums_C < np.inf
        seconds_C = others * np.maximum(fastest_C[there_C], paces_K[begin]) + sums_C[there_C]
        return float(seconds_C.min(initial=np.inf))

    # Bound, first and last pace, and sums at the last.
    first, last = int(np.searchsorted(paces_K, fastest_C.min(initial=np.inf))), len(paces_K) - 1
    heap = [(least_of(first, walk.least_C), first, last, walk.least_C.tolist())] if first <= last else []
    known = least_of(last, walk.least_C)
    while heap:
        bound, begin, end, sums = heapq.heappop(heap)
        is_found = bound >= min(known, below, enough) * (1 - PRECISION)
        if is_found or perf_counter() > deadline:
            return min(bound, below)
        # Between the paces, not between their numbers.
        middle = int(np.searchsorted(paces_K, (paces_K[begin] + paces_K[end]) / 2, "right")) - 1
        middle = min(max(middle, begin), end - 1)
        walk = walks.walk(float(paces_K[middle]))
        heapq.heappush(heap, (least_of(middle + 1, np.array(sums)), middle + 1, end, sums))
        if walk is not None:
            known = min(known, least_of(middle, walk.least_C))
            heapq.heappush(heap, (least_of(begin, walk.least_C), begin, middle, walk.least_C.tolist()))
    return below
