import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.plan.sharding import moved_of_unit


@pytest.mark.parametrize(
    ("sizes", "ratio", "moved"),
    [
        ((4, 8, 4), 0.0, ()),
        ((4, 8, 4), 1.0, (1, 0, 2)),
        ((4, 8, 4), 0.5, (1,)),
        ((4, 8, 4), 0.4, (0,)),  # The first of two equal ones; the second is too much.
        ((4, 0, 4), 1.0, (0, 2)),
        ((10,), 0.99, ()),
        ((0.1, 0.2), 1.0, (1, 0)),
        ((), 1.0, ()),
    ],
)
def test_the_largest_that_are_within_the_share(sizes, ratio, moved):
    assert moved_of_unit(sizes, ratio) == moved


@given(st.lists(st.integers(0, 10**6), max_size=12), st.floats(0, 1))
def test_never_more_than_the_share_and_nothing_that_would_still_be_within(sizes, ratio):
    moved = moved_of_unit(sizes, ratio)
    total = sum(sizes[index] for index in moved)
    assert total <= ratio * sum(sizes) * (1 + 1e-9)
    assert len(set(moved)) == len(moved)
    left = [size for index, size in enumerate(sizes) if index not in moved and size > 0]
    assert ratio == 0 or all(total + size > ratio * sum(sizes) for size in left)
