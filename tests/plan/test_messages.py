from hypothesis import given

from lightning_mist.plan import replica_of
from lightning_mist.plan.mesh import message_pairs
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
    # Parts: two of the first stage's make one of the second's. Wholes: equal indices. A length that only two divides:
    # each of the second's hands on what all of the first stage hold.
    assert {(0, 4), (1, 4), (2, 5), (3, 5), (1, 5), (5, 0), (4, 3)} <= set(message_pairs(along))


@given(plans(tensor_degrees=(1, 2)))
def test_nobody_sends_to_another_replica(plan):
    pairs = message_pairs(plan)
    assert list(pairs) == sorted(set(pairs))
    assert all(replica_of(plan, a) == replica_of(plan, b) for a, b in pairs)
