import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.plan.sharding import assign_owners, deal_buckets


def test_largest_first_to_the_least_loaded_rank():
    assert assign_owners([2, 7, 5, 4], 2) == (0, 0, 1, 1)
    assert assign_owners([3, 3, 3], 3) == (0, 1, 2)
    assert assign_owners([], 4) == ()


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), ranks=st.integers(1, 6))
def test_shares_are_balanced_within_one_parameter(sizes, ranks):
    owners = assign_owners(sizes, ranks)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert len(owners) == len(sizes)
    assert all(0 <= owner < ranks for owner in owners)
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(
    sizes=st.lists(st.integers(0, 3), max_size=20),
    loads=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    starts=st.booleans(),
)
def test_ties_go_to_the_earlier_parameter_and_the_lower_rank(sizes, loads, starts):
    most, wanted = list(loads) if starts else [0] * len(loads), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        wanted[index] = most.index(min(most))
        most[wanted[index]] += sizes[index]
    assert assign_owners(sizes, len(loads), loads if starts else ()) == tuple(wanted)


def test_no_ranks_is_refused():
    with pytest.raises(ValueError, match="ranks = 0"):
        assign_owners([1], 0)


def test_buckets_close_when_full_and_never_mix_owners():
    assert deal_buckets([4, 4, 4, 4], "aaaa", capacity=8, first_capacity=4) == ((0,), (1, 2), (3,))
    assert deal_buckets([4, 9, 4, 4], "abab", capacity=8, first_capacity=8) == ((1,), (0, 2), (3,))
    assert deal_buckets([], []) == ()
