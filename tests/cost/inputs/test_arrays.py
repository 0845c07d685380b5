from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from lightning_mist.cost.inputs.arrays import ArrayRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner(ArrayRecord):
    AXIS: ClassVar[str] = "J"

    value_J: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer(ArrayRecord):
    name: str
    first_K: np.ndarray
    behind_by_kind_K: np.ndarray
    ahead_KO: np.ndarray
    inner: Inner
    maybe_K: np.ndarray | None = None


def record(begin, end, maybe=False):
    values = np.arange(begin, end)
    return Outer(
        name="one",
        first_K=values,
        behind_by_kind_K=np.stack([values, 10 * values]),
        ahead_KO=np.stack([values, values, -values], axis=1),
        inner=Inner(value_J=values / 2),
        maybe_K=values if maybe else None,
    )


def same(found, wanted):
    assert type(found) is type(wanted)
    assert found.name == wanted.name
    for name in ("first_K", "behind_by_kind_K", "ahead_KO", "maybe_K"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    np.testing.assert_array_equal(found.inner.value_J, wanted.inner.value_J)


@pytest.mark.parametrize("index", [np.array([2, 3, 4]), np.array([False, False, True, True, True, False]), slice(2, 5)])
@pytest.mark.parametrize("maybe", [False, True])
def test_every_array_is_taken_along_the_axis_that_its_name_says(index, maybe):
    whole = record(0, 6, maybe)
    assert len(whole) == len(whole.inner) == 6
    same(whole.take(index), record(2, 5, maybe))


def test_what_is_joined_is_there_of_all():
    same(Outer.joined([record(0, 2, True), record(2, 3, True), record(3, 6, True)]), record(0, 6, True))
    same(Outer.joined([record(0, 2, True), record(2, 6)]), record(0, 6))
    whole = record(0, 2)
    assert Outer.joined([whole]) is whole
    assert Outer.joined([record(0, 0, True), whole, record(3, 3)]) is whole
