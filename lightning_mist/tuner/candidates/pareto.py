"""True non-dominated frontiers, not only their convex hull.

Array axes
    K  points
    J  points that are kept
"""

import numpy as np
import numpy.typing as npt

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray


def _ranks(values_K: FloatArray) -> IntArray:
    """The rank of each of some values, of equal ones that of the earlier first."""
    rank_K = np.empty(len(values_K), dtype=np.int64)
    rank_K[np.argsort(values_K, kind="stable")] = np.arange(len(values_K))
    return rank_K


def _numbers(sorted_K: IntArray) -> IntArray:
    """Numbers of the groups of points that come group by group."""
    number_K = np.zeros(len(sorted_K), dtype=np.int64)
    np.cumsum(sorted_K[1:] != sorted_K[:-1], out=number_K[1:])
    return number_K


def non_dominated(group_K: npt.ArrayLike, first_K: FloatArray, second_K: FloatArray) -> IntArray:
    """Indices of the points that no other point of their group equals or beats in both values.

    They come by group, then by rising first and falling second value. Of equal points the earliest is kept.

    Args:
        group_K: Group of each point, an integer; groups are independent of each other.
    """
    group = np.asarray(group_K, dtype=np.int64)
    order_K = np.lexsort((second_K, first_K, group))
    # Ranks are exact where offsets on floats would not be; the offset makes the running minimum restart in each group.
    rank_K = _ranks(second_K[order_K]) - _numbers(group[order_K]) * (len(order_K) + 1)
    is_kept_K = np.ones(len(order_K), dtype=bool)
    np.less(rank_K[1:], np.minimum.accumulate(rank_K)[:-1], out=is_kept_K[1:])
    kept_J: IntArray = order_K[is_kept_K]
    return kept_J


def not_beaten(
    group_K: IntArray, first_K: FloatArray, second_K: FloatArray, by: tuple[IntArray, FloatArray, FloatArray]
) -> BoolArray:
    """Which points no other of some points, of the same group, equals or beats in both values."""
    count = len(by[0])
    group, first, second = (np.concatenate(pair) for pair in zip(by, (group_K, first_K, second_K), strict=True))
    is_other = np.arange(len(group)) < count
    # By group, in each by rising first value, in each of these the others first.
    order = np.lexsort((~is_other, first, group))
    # Ranks fall from group to group, so that the running minimum begins anew in each. Of equal values that of another
    # comes first, so that it is less.
    rank = _ranks(second[order]) - _numbers(group[order]) * (len(order) + 1)
    least = np.minimum.accumulate(np.where(is_other[order], rank, np.iinfo(np.int64).max))
    found_K = np.empty(len(group), dtype=bool)
    found_K[order] = rank < least
    result_K: BoolArray = found_K[count:]
    return result_K
