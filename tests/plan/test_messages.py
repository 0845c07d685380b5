import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.plan import replica_of, row_slice
from lightning_mist.plan.messages import disjoint, message_pairs, sends_random_states
from tests.integration.parity import make_plan
from tests.plans import plans


def test_neighbours_send_each_other_activations_and_gradients():
    assert message_pairs(make_plan([1, 1, 1])) == ((0, 1), (1, 0), (1, 2), (2, 1))
    assert message_pairs(make_plan([4], degrees=[3])) == ()
    # Chunks of two groups: the second sends on to the first.
    assert message_pairs(make_plan([1, 1, 1, 1], chunks=2, schedule="interleaved-1f1b")) == ((0, 1), (1, 0))
    # Each half of the rows of the second stage comes from another rank of the first.
    assert message_pairs(make_plan([1, 1], degrees=[2, 1])) == ((0, 2), (1, 2), (2, 0), (2, 1))
    assert message_pairs(make_plan([1, 1], degrees=[2, 2])) == ((0, 2), (1, 3), (2, 0), (3, 1))


def test_what_is_held_whole_crosses_also_between_parts_of_sequences():
    along = make_plan([1, 1], tensor=[4, 2], sequence=True)
    whole = make_plan([1, 1], tensor=[4, 2])
    assert set(message_pairs(along)) > set(message_pairs(whole))
    # Parts: two of the first stage's make one of the second's. Wholes: equal indices.
    assert {(0, 4), (1, 4), (2, 5), (3, 5), (1, 5)} <= set(message_pairs(along))


@given(plans(tensor_degrees=(1, 2)))
def test_nobody_sends_to_another_replica(plan):
    pairs = message_pairs(plan)
    assert list(pairs) == sorted(set(pairs))
    assert all(replica_of(plan, a) == replica_of(plan, b) for a, b in pairs)


@given(plans())
def test_states_travel_where_all_batches_are_whole(plan):
    parts = {row_slice(plan, r, m).parts for r in range(plan.world_size) for m in range(plan.num_microbatches)}
    assert sends_random_states(plan) == (parts == {1} and plan.num_stages > 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), unique=True, max_size=40))
def test_pairs_that_are_made_at_once_share_no_rank(pairs):
    lists = disjoint(pairs)
    assert sorted(pair for each in lists for pair in each) == sorted(pairs)
    for each in lists:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    most = max((sum(rank in pair for pair in pairs) for rank in range(20)), default=0)
    assert len(lists) <= max(0, 2 * most - 1)


@pytest.mark.parametrize("stages", [2, 5])
def test_a_chain_is_made_in_four_lists_at_most(stages):
    assert len(disjoint(message_pairs(make_plan([1] * stages)))) == min(4, 2 * (stages - 1))
