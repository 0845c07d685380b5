"""Seconds of one optimizer step from those of its stages.

With ``t_i`` the steady time of stage ``i`` (forward and backward of a middle microbatch), ``d_i`` its boundary time
(what its first and last microbatch take beyond that: reducing gradients, updating, gathering) and ``G`` microbatches,

    step = (G - 1) max_i t_i + sum_i t_i + max(0, max_i (d_i - sum_{j < i} t_j))

The slowest stage sets the pace, every stage is passed once, and a stage's boundary work counts only as far as it
exceeds the time for which the stages before it are still busy, because stage 0 finishes last and starts first (Zhu et
al., Mist, 2025).

Array axes
    S  stages
    K  pipelines
"""

import numpy as np
import numpy.typing as npt

from lightning_mist.cost.compile import FloatArray


def step_seconds_of(steady_SK: FloatArray, boundary_SK: FloatArray, num_microbatches: int) -> FloatArray:
    """Seconds of one step of many pipelines.

    Args:
        steady_SK: Steady seconds by stage and pipeline.
        boundary_SK: Boundary seconds by stage and pipeline.
        num_microbatches: Number of microbatches.

    Raises:
        ValueError: If there is no stage or no microbatch, or the shapes differ.
    """
    if not len(steady_SK) or steady_SK.shape != boundary_SK.shape or num_microbatches < 1:
        raise ValueError(
            f"steady times of shape {steady_SK.shape} and boundary times of shape {boundary_SK.shape} for "
            f"{num_microbatches} microbatches: shapes must be equal, with at least one stage and one microbatch"
        )
    before_SK = np.cumsum(steady_SK, axis=0) - steady_SK
    exposed_K = np.maximum(0.0, (boundary_SK - before_SK).max(axis=0))
    result_K: FloatArray = (num_microbatches - 1) * steady_SK.max(axis=0) + steady_SK.sum(axis=0) + exposed_K
    return result_K


def step_seconds(steady_S: npt.ArrayLike, boundary_S: npt.ArrayLike, num_microbatches: int) -> float:
    """Seconds of one step of one pipeline; see :func:`step_seconds_of`."""
    steady_SK = np.asarray(steady_S, dtype=np.float64).reshape(-1, 1)
    boundary_SK = np.asarray(boundary_S, dtype=np.float64).reshape(-1, 1)
    return float(step_seconds_of(steady_SK, boundary_SK, num_microbatches)[0])
