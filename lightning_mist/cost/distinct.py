"""Which of many candidates ask the same question, mostly without sorting them.

Array axes
    K  candidates
    U  distinct questions among them
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mist.cost.compile import FloatArray, IntArray

_MARKED = 1 << 20
"""Up to here marking the numbers that occur may be faster than sorting them."""

_SPARSE = 32
"""Numbers per candidate from which on sorting candidates is faster: 1.5 ns for each number, 50 ns for a candidate."""

_DENSE = 1 << 12
"""Whole numbers below it stand for themselves."""

_LARGEST = 1 << 62
"""Numbers of columns together stay below it, so that they fit into 64 bits."""


def distinct_codes(code_K: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The distinct ones among small numbers, ascending, and which of them each candidate has.

    Args:
        code_K: Whole numbers from 0 on.
        size: One more than the largest possible.
    """
    if size > min(_MARKED, _SPARSE * len(code_K) + 1024):
        code_U, inverse_K = np.unique(code_K, return_inverse=True)
        return code_U, inverse_K.reshape(-1)
    occurs = np.zeros(size, dtype=np.int64)
    occurs[code_K] = 1
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[code_K]


def distinct_rows(*columns: NDArray[Any]) -> tuple[FloatArray, IntArray]:
    """The distinct rows of some columns, and which of them each candidate has.

    Args:
        columns: Values of each candidate.

    Returns:
        The rows, ascending, with axes ``U`` and column; and for each candidate the index of its row.
    """
    code_K, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        count, place_K = _places(column)
        if size * count > _LARGEST:
            code_U, code_K = np.unique(code_K, return_inverse=True)
            code_K, size = code_K.reshape(-1), len(code_U)
        code_K, size = code_K * count + place_K, size * count
    code_U, inverse_K = distinct_codes(code_K, size)
    first_U = np.empty(len(code_U), dtype=np.int64)
    # The last assignment stays: backwards, the first candidate of each.
    first_U[inverse_K[::-1]] = np.arange(len(inverse_K))[::-1]
    rows = np.empty((len(code_U), len(columns)))
    for index, column in enumerate(columns):
        rows[:, index] = column[first_U]
    return rows, inverse_K


def _places(values_K: NDArray[Any]) -> tuple[int, IntArray]:
    """Numbers that tell the values of a column apart and rise with them, and how many such numbers there may be."""
    if len(values_K) and bool((values_K == values_K[0]).all()):
        return 1, np.zeros(len(values_K), dtype=np.int64)
    if values_K.dtype.kind in "iu" and len(values_K) and values_K.min() >= 0 and values_K.max() < _DENSE:
        return int(values_K.max()) + 1, values_K.astype(np.int64)
    values_U, inverse_K = np.unique(values_K, return_inverse=True)
    return max(1, len(values_U)), inverse_K.reshape(-1)
