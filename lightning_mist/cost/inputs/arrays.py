"""Arrays with one axis in common, such as candidates: records of them, distinct rows, and prefix sums.

Array axes
    K  candidates
    J  distinct questions among them
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_mist.cost.inputs.expressions import BoolArray, FloatArray, IntArray

Index: TypeAlias = IntArray | BoolArray | slice
"""Which entries: their indices, where a mask is true, or from one to before another."""

Record = TypeVar("Record", bound="ArrayRecord")


class ArrayRecord:
    """Base of frozen, slotted dataclasses whose arrays share an axis, one of those that letters of their names say.

    Letters say the last axes: of ``times_by_kind_K`` the axis ``K`` is the last. Records among the fields, whose names
    say no axis, have as many entries and go along; a field that may be ``None`` is an array or a record. What is named
    otherwise belongs to all entries alike.
    """

    __slots__ = ()
    AXIS: ClassVar[str] = "K"

    def __len__(self) -> int:
        """Number of entries."""
        name, axis = _layout(type(self))[0]
        assert axis is not None
        return int(getattr(self, name).shape[axis])

    def take(self: Record, index: Index) -> Record:
        """Some of the entries; those of a slice share memory with these."""
        at: IntArray | slice = index if isinstance(index, slice) else _indices(index, len(self))
        return type(self)(**{name: _taken(getattr(self, name), at, axis) for name, axis in _layout(type(self))})

    @classmethod
    def joined(cls: type[Record], items: Sequence[Record]) -> Record:
        """The entries of at least one record, one after another; what is ``None`` of any is ``None``."""
        some = [item for item in items if len(item)] or items[:1]
        if len(some) == 1:
            return some[0]
        return cls(**{name: _joined([getattr(item, name) for item in some], axis) for name, axis in _layout(cls)})


_layouts: dict[type[Any], tuple[tuple[str, int | None], ...]] = {}


def _layout(record: type[Any]) -> tuple[tuple[str, int | None], ...]:
    """Names of fields, and along which axis of each array entries lie; those arrays come first."""
    if record not in _layouts:
        found: list[tuple[str, int | None]] = []
        for name in (field.name for field in fields(record)):
            letters = name.rpartition("_")[2]
            is_along = letters.isupper() and record.AXIS in letters
            found.append((name, letters.index(record.AXIS) - len(letters) if is_along else None))
        _layouts[record] = tuple(sorted(found, key=lambda item: item[1] is None))
    return _layouts[record]


def _indices(index: IntArray | BoolArray, count: int) -> IntArray:
    """Indices, or those of the entries where a mask is true, which is searched once and not for every array."""
    if index.dtype != np.bool_:
        return index.astype(np.int64, casting="same_kind", copy=False)
    if index.shape != (count,):
        raise IndexError(f"a mask of shape {index.shape} does not say which of {count} entries are taken")
    return np.flatnonzero(index)


def _taken(value: Any, index: IntArray | slice, axis: int | None) -> Any:
    if axis is None or value is None:
        return value.take(index) if isinstance(value, ArrayRecord) else value
    if not isinstance(index, slice):
        return value.take(index) if value.ndim == 1 else value.take(index, axis)
    place = (..., index, *(slice(None),) * (-1 - axis))
    return value[place]


def _joined(values: list[Any], axis: int | None) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], ArrayRecord):
        return values[0].joined(values)
    return values[0] if axis is None else np.concatenate(values, axis=axis)


_MARKED = 1 << 20
"""Up to here marking the numbers that occur may be faster than sorting them."""

_SPARSE = 32
"""Numbers per candidate from which on sorting candidates is faster: 1.5 ns for each number, 50 ns for a candidate."""

_DENSE = 1 << 12
"""Whole numbers below it stand for themselves."""

_LARGEST = 1 << 62
"""Numbers of columns together stay below it, so that they fit into 64 bits."""


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct values, ascending; of as few as most questions have sooner than :func:`numpy.unique`."""
    ordered = np.sort(values, axis=None)
    is_new = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def distinct_codes(code_K: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The distinct ones among small numbers, ascending, and which of them each candidate has."""
    if size > min(_MARKED, _SPARSE * len(code_K) + 1024):
        code_J, inverse_K = np.unique(code_K, return_inverse=True)
        return code_J, inverse_K.reshape(-1)
    occurs = np.zeros(size, dtype=np.int64)
    occurs[code_K] = 1
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[code_K]


def distinct_rows(*columns: NDArray[Any]) -> tuple[FloatArray, IntArray]:
    """The distinct rows of some columns, and which of them each candidate has.

    Returns:
        The rows, ascending, with axes ``J`` and column; and for each candidate the index of its row.
    """
    code_K, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        count, place_K = _places(column)
        if size * count > _LARGEST:
            code_J, code_K = np.unique(code_K, return_inverse=True)
            code_K, size = code_K.reshape(-1), len(code_J)
        code_K, size = code_K * count + place_K, size * count
    code_J, inverse_K = distinct_codes(code_K, size)
    first_J = np.empty(len(code_J), dtype=np.int64)
    # The last assignment stays: backwards, the first candidate of each.
    first_J[inverse_K[::-1]] = np.arange(len(inverse_K))[::-1]
    rows = np.empty((len(code_J), len(columns)))
    for index, column in enumerate(columns):
        rows[:, index] = column[first_J]
    return rows, inverse_K


def _places(values_K: NDArray[Any]) -> tuple[int, IntArray]:
    """Numbers that tell the values of a column apart and rise with them, and how many such numbers there may be."""
    if len(values_K) and bool((values_K == values_K[0]).all()):
        return 1, np.zeros(len(values_K), dtype=np.int64)
    if values_K.dtype.kind in "iu" and len(values_K) and values_K.min() >= 0 and values_K.max() < _DENSE:
        return int(values_K.max()) + 1, values_K.astype(np.int64)
    values_J, inverse_K = np.unique(values_K, return_inverse=True)
    return max(1, len(values_J)), inverse_K.reshape(-1)


def prefix_sums(values_R: FloatArray) -> FloatArray:
    """Sums over what comes before each value, and over all; of several rows, those of each."""
    sums = np.zeros((*values_R.shape[:-1], values_R.shape[-1] + 1))
    np.cumsum(values_R, axis=-1, out=sums[..., 1:])
    return sums
