"""Which of many candidates ask the same question, mostly without sorting them.

Array axes
    K  candidates
    U  distinct questions among them
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mist.cost.compile import FloatArray, IntArray

_MARKED = 1 << 20
"""Up to here marking the numbers that occur is faster than sorting them."""


def distinct_codes(code_K: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The distinct ones among small numbers, ascending, and which of them each candidate has.

    Args:
        code_K: Whole numbers from 0 on.
        size: One more than the largest possible.
    """
    if size > _MARKED:
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
    code_K, found = np.zeros(len(columns[0]), dtype=np.int64), []
    for column in columns:
        values_U, place_K = _distinct_values(column)
        found.append(values_U)
        code_K = code_K * len(values_U) + place_K
    sizes = [len(values) for values in found]
    code_U, inverse_K = distinct_codes(code_K, prod(sizes))
    places = np.unravel_index(code_U, sizes)
    rows = np.stack([values[place] for values, place in zip(found, places, strict=True)], axis=1)
    return rows.astype(np.float64), inverse_K


def _distinct_values(values_K: NDArray[Any]) -> tuple[NDArray[Any], IntArray]:
    if len(values_K) and bool((values_K == values_K[0]).all()):
        return values_K[:1], np.zeros(len(values_K), dtype=np.int64)
    if values_K.dtype.kind == "i" and values_K.min() >= 0 and values_K.max() < _MARKED:
        return distinct_codes(values_K, int(values_K.max()) + 1)
    values_U, inverse_K = np.unique(values_K, return_inverse=True)
    return values_U, inverse_K.reshape(-1)
