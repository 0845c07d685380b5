import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import PlanError
from lightning_mist.plan import replica_of, row_slice
from lightning_mist.plan.mesh import message_pairs, overlaps
from tests.integration.parity import make_plan
from tests.plan.test_mesh import make_plan as of_degrees
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


def test_slices_are_exchanged_by_overlap():
    plan = of_degrees([2, 3], num_microbatches=5)
    shares = [[(o.ranks[0], o.first, o.end) for o in overlaps(plan, rank, 1, 0, 12)] for rank in (0, 1)]
    assert shares == [[(2, 0, 4), (3, 4, 6)], [(3, 0, 2), (4, 2, 6)]]
    assert [(o.ranks[0], o.first, o.end) for o in overlaps(plan, 3, 0, 0, 12)] == [(0, 0, 2), (1, 2, 4)]


def test_a_batch_without_rows_goes_whole_or_not_at_all():
    plan = of_degrees([1, 1])
    assert [(o.ranks[0], o.first, o.end) for o in overlaps(plan, 0, 1, 0, None)] == [(1, 0, 1)]
    for rank, neighbour in ((0, 1), (1, 0)):
        with pytest.raises(PlanError, match="part 0 of 2 of the batch of rank 0"):
            overlaps(of_degrees([1, 1], num_microbatches=4), rank, neighbour, 0, None)


@given(
    plan=plans(max_microbatches=12, runnable=False, fewer_loaders=True), batch_rows=st.integers(0, 13), data=st.data()
)
def test_overlaps_tile_every_slice_and_agree_on_both_sides(plan, batch_rows, data):
    if plan.num_stages == 1:
        return
    index = data.draw(st.integers(0, plan.num_microbatches - 1))
    stage = data.draw(st.integers(0, plan.num_stages - 2))

    def shared(of, other):
        found = {}
        for rank in plan.stages[of].devices:
            low, high = row_slice(plan, rank, index).rows(batch_rows)
            mine = overlaps(plan, rank, other, index, batch_rows)
            assert [row for o in mine for row in range(o.first, o.end)] == list(range(high - low))
            found |= {(rank, peer): (low + o.first, low + o.end) for o in mine for peer in o.ranks}
        return found

    back = {(peer, rank): rows for (rank, peer), rows in shared(stage + 1, stage).items()}
    assert shared(stage, stage + 1) == back
