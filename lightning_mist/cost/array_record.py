"""Frozen dataclasses of arrays that have one axis in common, such as candidates."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from lightning_mist.cost.compile import BoolArray, IntArray

Index: TypeAlias = IntArray | BoolArray | slice
"""Which entries: their indices, where a mask is true, or from one to before another."""

Record = TypeVar("Record", bound="ArrayRecord")


class ArrayRecord:
    """Base of frozen, slotted dataclasses whose arrays share an axis, the first or the last by their names' letters.

    Of ``parts_FK`` the axis ``K`` is the last. Records among the fields have as many entries and go along; a field that
    may be ``None`` is an array or a record. What is named otherwise belongs to all entries alike.

    Attributes:
        AXIS: The letter of the axis.
    """

    __slots__ = ()
    AXIS: ClassVar[str] = "K"

    def __len__(self) -> int:
        """Number of entries."""
        name, axis = next(item for item in _layout(type(self)) if item[1] is not None)
        return int(getattr(self, name).shape[axis])

    def take(self: Record, index: Index) -> Record:
        """Some of the entries; those of a slice share memory with these."""
        return type(self)(**{name: _taken(getattr(self, name), index, axis) for name, axis in _layout(type(self))})

    @classmethod
    def joined(cls: type[Record], items: Sequence[Record]) -> Record:
        """The entries of at least one record, one after another; what is ``None`` of any is ``None``."""
        some = [item for item in items if len(item)] or items[:1]
        if len(some) == 1:
            return some[0]
        return cls(**{name: _joined([getattr(item, name) for item in some], axis) for name, axis in _layout(cls)})


_layouts: dict[type[Any], tuple[tuple[str, int | None], ...]] = {}


def _layout(record: type[Any]) -> tuple[tuple[str, int | None], ...]:
    """Names of fields, and along which axis of each array entries lie."""
    if record not in _layouts:
        found: list[tuple[str, int | None]] = []
        for name in (field.name for field in fields(record)):
            letters = name.rpartition("_")[2]
            is_along = letters.isupper() and record.AXIS in (letters[0], letters[-1])
            found.append((name, (0 if letters[0] == record.AXIS else -1) if is_along else None))
        _layouts[record] = tuple(found)
    return _layouts[record]


def _taken(value: Any, index: Index, axis: int | None) -> Any:
    if isinstance(value, ArrayRecord):
        return value.take(index)
    if axis is None or value is None:
        return value
    if not isinstance(index, slice) and index.dtype != np.bool_:
        return value.take(index, axis=axis)
    return value[index] if axis == 0 else value[..., index]


def _joined(values: list[Any], axis: int | None) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], ArrayRecord):
        return values[0].joined(values)
    return values[0] if axis is None else np.concatenate(values, axis=axis)
