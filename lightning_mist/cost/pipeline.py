"""Seconds of one optimizer step from those of its stages.

With ``t_i`` the steady time of stage ``i`` (forward and backward of a middle microbatch), ``d_i`` its boundary time
(what its first and last microbatch take beyond that: reducing gradients, updating, gathering) and ``G`` microbatches,

    step = (G - 1) max_i t_i + sum_i t_i + max(0, max_i (d_i - sum_{j < i} t_j))

The slowest stage sets the pace, every stage is passed once, and a stage's boundary work counts only as far as it
exceeds the time for which the stages before it are still busy, because stage 0 finishes last and starts first (Zhu et
al., Mist, 2025).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def step_seconds(steady_S: Sequence[float] | npt.ArrayLike, boundary_S: npt.ArrayLike, num_microbatches: int) -> float:
    """Seconds of one step.

    Args:
        steady_S: Steady seconds of every stage.
        boundary_S: Boundary seconds of every stage.
        num_microbatches: Number of microbatches.

    Raises:
        ValueError: If there is no stage or no microbatch.
    """
    steady, boundary = np.asarray(steady_S, dtype=np.float64), np.asarray(boundary_S, dtype=np.float64)
    if steady.size == 0 or steady.shape != boundary.shape or num_microbatches < 1:
        raise ValueError(
            f"{steady.size} steady and {boundary.size} boundary times for {num_microbatches} microbatches: "
            "there must be as many of both, at least one, and at least one microbatch"
        )
    before = np.concatenate([[0.0], np.cumsum(steady)[:-1]])
    exposed = max(0.0, float((boundary - before).max()))
    return float((num_microbatches - 1) * steady.max() + steady.sum() + exposed)
