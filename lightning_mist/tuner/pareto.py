"""True non-dominated frontiers, not only their convex hull.

Array axes
    K  points
    J  points that are kept
"""

import numpy as np
import numpy.typing as npt

from lightning_mist.cost.compile import FloatArray, IntArray


def non_dominated(group_K: npt.ArrayLike, first_K: FloatArray, second_K: FloatArray) -> IntArray:
    """Indices of the points that no other point of their group equals or beats in both values.

    Args:
        group_K: Group of each point, an integer; groups are independent of each other.
        first_K: First value, smaller is better.
        second_K: Second value, smaller is better.

    Returns:
        Indices ordered by group, then by rising first and falling second value. Of equal points the earliest is kept.
    """
    group = np.asarray(group_K, dtype=np.int64)
    order_K = np.lexsort((second_K, first_K, group))
    if not len(order_K):
        return order_K
    # Ranks are exact where offsets on floats would not be; the offset makes the running minimum restart in each group.
    _, rank_K = np.unique(second_K[order_K], return_inverse=True)
    rank_K = rank_K.reshape(-1)
    _, group_index_K = np.unique(group[order_K], return_inverse=True)
    shifted_K = rank_K - group_index_K.reshape(-1) * (len(order_K) + 1)
    best_before_K = np.minimum.accumulate(np.concatenate([[len(order_K) + 1], shifted_K[:-1]]))
    kept_J: IntArray = order_K[shifted_K < best_before_K]
    return kept_J
