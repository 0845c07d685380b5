"""Runs of layers that differ only in how many are recomputed, as one.

Of ``l`` layers ``0 .. l`` can be recomputed, so that most runs differ in nothing else. A run that stands for all of
them recomputes as few as any, and may recompute more, which is one more way to free bytes beside moving them to host
memory: of what is there in a moment of a backward, and of what every other microbatch in flight keeps, a second of it
frees at most what it does in the run where that is most. So it takes no longer than any of them, whatever has to be
freed, and little less than the best if there are many. Short runs, of which there are few, stand for themselves.

Array axes
    K, X  see :mod:`lightning_mist.tuner.least_runs`
    F  runs that stand for others
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray

SHORT = 4
"""Layers of the longest runs that stand for themselves."""


def folded(of_zeros: Sequence[Mapping[str, Any]], again_K: FloatArray) -> tuple[Mapping[str, Any], ...]:
    """Fold the runs of an arrangement of devices.

    Args:
        of_zeros: What :class:`~lightning_mist.tuner.least_runs.LeastRuns` has of them, by ZeRO stage, of which what
            microbatches keep and what is alive in a backward depend on none.
        again_K: Seconds that each recomputes.

    Returns:
        What :class:`~lightning_mist.tuner.least_runs.FoldedRuns` has of them, by ZeRO stage.
    """
    layers_K = of_zeros[0]["layers_K"]
    is_base_K = (np.diff(layers_K, prepend=0) > 0) | (layers_K <= SHORT)
    begins_F = np.flatnonzero(is_base_K)
    more_K = again_K - np.repeat(again_K[begins_F], np.diff(begins_F, append=len(layers_K)))
    if (more_K[~is_base_K] <= 0).any():
        # Where recomputing takes no time nothing can be said of what a second of it frees.
        begins_F, more_K = np.arange(len(layers_K)), np.zeros(len(layers_K))
    together = _together(of_zeros[0], more_K, begins_F)
    return tuple({name: values[..., begins_F] for name, values in runs.items()} | together for runs in of_zeros)


def _together(runs: Mapping[str, Any], more_K: FloatArray, begins_F: IntArray) -> dict[str, FloatArray]:
    """What recomputing for so many more seconds frees, and the most of what there is to move."""
    sizes_F = np.diff(begins_F, append=len(more_K))

    def most(values_K: FloatArray) -> FloatArray:
        found: FloatArray = np.maximum.reduceat(values_K, begins_F, axis=-1)
        return found

    def freed(values_K: FloatArray) -> FloatArray:
        found: FloatArray = np.maximum(np.repeat(values_K[..., begins_F], sizes_F, axis=-1) - values_K, 0.0)
        return found

    freed_XK, freed_saved_K, whole_K = freed(runs["working_XK"]), freed(runs["saved_K"]), runs["whole_K"]
    second_K = np.where(more_K > 0, more_K, np.inf)
    below_K = np.maximum(whole_K - runs["top_two_K"], 0.0)
    own_XK = np.stack([below_K, below_K, whole_K])
    # Of what is kept, the least share of the last layer, and of the last two.
    safe_K = np.where(whole_K > 0, whole_K, 1.0)
    whole_F = most(whole_K)
    top_F = -most(-np.where(whole_K > 0, np.minimum(runs["top_K"] / safe_K, 1.0), 0.0)) * whole_F
    top_two_F = -most(-np.where(whole_K > 0, np.minimum(runs["top_two_K"] / safe_K, 1.0), 0.0)) * whole_F
    return {
        "whole_K": whole_F,
        "top_K": top_F,
        "top_two_K": top_two_F,
        "freed_XK": most(freed_XK),
        "freed_saved_K": most(freed_saved_K),
        "rate_XK": most(freed_XK / second_K),
        "rate_saved_K": most(freed_saved_K / second_K),
        "both_XK": most(freed_XK + own_XK),
        "both_saved_K": most(freed_saved_K + whole_K),
    }
