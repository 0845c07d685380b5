import dataclasses

from lightning_mist.plan import LiveTensor
from lightning_mist.plan.mesh import Side, make_mesh
from lightning_mist.runtime.communication.transport import Microbatch, Neighbours
from tests.integration.parity import make_plan
from tests.plan.test_mesh import make_map


def _microbatch(index, rows):
    return Microbatch(value=None, weight=1.0, owner=0, index=index, batch_rows=rows)


def test_a_tensor_without_batch_dimension_comes_from_one_sender_each():
    plan = make_plan([1, 1], degrees=[3, 2], rows=12)
    senders = [Neighbours(make_mesh(plan, rank, make_map(2))) for rank in range(3)]
    part = _microbatch(0, 12)
    assert [[o.ranks[0] for o in sender.after(0, part, 0)] for sender in senders] == [[3], [3, 4], [4]]
    assert [[o.ranks[0] for o in sender.after(0, part, None)] for sender in senders] == [[3], [4], []]
    receivers = [Neighbours(make_mesh(plan, rank, make_map(2))) for rank in (3, 4)]
    assert [[o.ranks[0] for o in receiver.before(1, part)] for receiver in receivers] == [[0, 1], [1, 2]]
    assert [[o.ranks[0] for o in receiver.before(1, part, None)] for receiver in receivers] == [[0], [1]]


def test_rows_follow_the_size_of_the_batch():
    plan = make_plan([1, 1], degrees=[3, 2], rows=12)
    neighbours = Neighbours(make_mesh(plan, 0, make_map(2)))
    assert [neighbours.rows(_microbatch(0, rows)) for rows in (12, 6, 2, 0)] == [4, 2, 0, 0]
    assert neighbours.rows(_microbatch(0, None)) == 1


def test_a_crossing_knows_how_both_sides_hold_a_tensor():
    plan = make_plan([1, 1], degrees=[1, 2], tensor=[2, 1], sequence=[True, False], rows=12)
    live = LiveTensor(key="h", shape=(12, 8, 3), dtype="float32", requires_grad=True, batch_dim=0, sequence_dim=1)
    part = _microbatch(0, 12)
    sender = Neighbours(make_mesh(plan, 1, make_map(2))).crossing(0, 1, part, live, 8)
    assert (sender.mine, sender.theirs, sender.index) == (Side(degree=2, is_shared=True), Side(degree=1), 1)
    assert (sender.rows, sender.sequence_dim, sender.length) == (12, 1, 8)
    receiver = Neighbours(make_mesh(plan, 3, make_map(2))).crossing(1, 0, part, live, 8)
    assert (receiver.mine, receiver.theirs, receiver.index, receiver.rows) == (sender.theirs, sender.mine, 0, 6)
    whole = dataclasses.replace(live, sequence_dim=None)
    assert Neighbours(make_mesh(plan, 1, make_map(2))).crossing(0, 1, part, whole).mine == Side(degree=2)
