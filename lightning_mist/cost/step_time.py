"""Seconds of one optimizer step from those of its stages, in closed form.

With ``t_i`` the steady time of stage ``i`` (forward and backward of a middle microbatch), ``d_i`` its boundary time
(what its first and last microbatch take beyond that: reducing gradients, updating, gathering) and ``G`` microbatches,

    step = (G - 1) max_i t_i + sum_i t_i + max(0, max_i (d_i - sum_{j < i} t_j))

The slowest stage sets the pace, every stage is passed once, and a stage's boundary work counts only as far as it
exceeds the time for which the stages before it are still busy, because stage 0 finishes last and starts first (Zhu et
al., Mist, 2025). Where the runtime lets no stage begin a part ``u_i`` of that work before all have come as far, that
part cannot hide:

    step = (G - 1) max_i t_i + sum_i t_i + max(0, max_i (d_i - u_i - sum_{j < i} t_j)) + max_i u_i

which is never less than the first form.

The search minimises the first form; what is said of a plan comes from the clock
(:mod:`lightning_mist.cost.plan_clock`). On it 1F1B and GPipe take exactly the closed form if all stages are alike and
transfers take no time, and no longer if forward and backward are in one ratio on all stages and boundary work takes no
time. Elsewhere the two differ, because forwards and backwards have slowest stages of their own, warm-up and cool-down
overlap with them, transfers hide or show, and stages wait for updates that those in front have put off into their first
forwards, which the form lets hide behind these. Over 2,000 random pipelines of 2 to 8 stages and 2 to 64 microbatches,
whose forwards and backwards each vary by a factor of 2, and where a transfer takes up to a tenth of the shortest
forward, reducing up to two of them and updating up to two of them, a step on the clock takes 0.87 to 1.01 times the
first form by the rules of a device (0.98 on average), 0.88 to 1.08 times by those of a CPU (0.99). The second form was
never exceeded; the least was 0.86 of it.

Array axes
    S  stages
    K  pipelines
"""

import numpy as np
import numpy.typing as npt

from lightning_mist.cost.inputs import FloatArray


def step_seconds_of(steady_SK: FloatArray, boundary_SK: FloatArray, num_microbatches: int) -> FloatArray:
    """Seconds of one step of many pipelines, by the first form.

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

    def column(values_S: npt.ArrayLike) -> FloatArray:
        return np.asarray(values_S, dtype=np.float64).reshape(-1, 1)

    return float(step_seconds_of(column(steady_S), column(boundary_S), num_microbatches)[0])
