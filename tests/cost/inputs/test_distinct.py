import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.cost.inputs.arrays import distinct, distinct_codes, distinct_rows

ROWS = st.lists(
    st.tuples(st.integers(-2, 3), st.sampled_from([0.0, 0.25, 1 / 3]), st.just(7), st.integers(0, 2)), min_size=1
)


@given(st.lists(st.integers(-3, 3)))
def test_values_are_told_apart(values: list[int]) -> None:
    assert distinct(np.array(values, dtype=np.int64)).tolist() == sorted({*values})


@given(ROWS)
def test_rows_are_those_that_sorting_finds(rows: list[tuple[float, ...]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    found, inverse = distinct_rows(*columns)
    assert found.tolist() == sorted(list(map(float, row)) for row in {*rows})
    assert found[inverse].tolist() == [list(map(float, row)) for row in rows]


@pytest.mark.parametrize("size", [10, 10**7])
def test_few_and_many_codes(size: int) -> None:
    codes = np.array([7, 3, 7, 0])
    found, inverse = distinct_codes(codes, size)
    assert found.tolist() == [0, 3, 7]
    assert inverse.tolist() == [2, 1, 2, 0]


def test_many_columns_of_many_values_are_told_apart() -> None:
    # As many combinations as do not fit into 64 bits.
    count, random = 600, np.random.default_rng(3)
    columns = [random.permutation(count) / count for _ in range(9)]
    doubled = [np.concatenate([column, column[::-1]]) for column in columns]
    found, inverse = distinct_rows(*doubled)
    assert found.tolist() == sorted(found.tolist())
    assert len(found) == count
    assert (found[inverse] == np.stack(doubled, axis=1)).all()


def test_nothing_has_no_rows() -> None:
    found, inverse = distinct_rows(np.empty(0), np.empty(0, dtype=np.int64))
    assert found.shape == (0, 2)
    assert inverse.shape == (0,)
