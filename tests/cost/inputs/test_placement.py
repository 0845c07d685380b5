import itertools

import pytest

from lightning_mist.cost.inputs.placement import placements_of
from lightning_mist.plan import LiveTensor
from lightning_mist.plan.grid import rank_layout, rank_layouts
from lightning_mist.plan.mesh import overlaps, side_of
from tests.plans import plan_of

LIVE = LiveTensor(key="x", shape=(1, 24), dtype="float32", batch_dim=0, requires_grad=True, sequence_dim=1)


def make_plan(degrees, *, nodes=None, sequence=False, context=1, layout=None):
    """A plan of one layer per stage, ``degrees`` being data and tensor parallelism of each."""
    layout = layout or rank_layout([(data * context, tensor) for data, tensor in degrees], nodes)
    world, rows = sum(map(len, layout)), max(data for data, _ in degrees)
    options = {"context": context, "sequence": sequence}
    stages = [
        {"devices": devices, "tensor": tensor, **options} for devices, (_, tensor) in zip(layout, degrees, strict=True)
    ]
    return plan_of(rows * world, world, *stages)


def counted(plan, stage, devices_per_node):
    """The same from what the runtime sends, rank by rank and tensor by tensor."""
    length = 24
    after, sends, receives, messages = plan.stages[stage + 1], {}, {}, {}
    rows = plan.stages[0].microbatch_size * plan.stages[0].data_parallel_degree / plan.num_replicas
    batch_rows = plan.global_batch_size // plan.world_size
    across = False
    for receiver in after.devices:
        tensor = after.mesh.tensor_parallel_degree
        index = after.devices.index(receiver) % tensor
        for overlap in overlaps(plan, receiver, stage, 0, batch_rows):
            theirs, mine = side_of(plan, stage, LIVE), side_of(plan, stage + 1, LIVE)
            for source, low, high in mine.sources(index, theirs, length):
                sender, size = overlap.ranks[source], (overlap.end - overlap.first) * (high - low) / (rows * length)
                sends[sender] = sends.get(sender, 0) + size
                receives[receiver] = receives.get(receiver, 0) + size
                for end in (("s", sender), ("r", receiver)):
                    messages[end] = messages.get(end, 0) + 1
                across |= sender // devices_per_node != receiver // devices_per_node
    counts = [max(count for (end, _), count in messages.items() if end == side) for side in ("s", "r")]
    return max(sends.values()), max(receives.values()), *counts, across


@pytest.mark.parametrize(
    "degrees",
    [
        *itertools.product([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)], repeat=2),
        ((2, 1), (4, 1), (1, 2)),
        ((4, 2), (2, 4), (8, 1)),
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_crossings_are_what_the_runtime_sends(degrees, sequence):
    plan = make_plan(degrees, sequence=sequence)
    found = placements_of(plan, 4)
    for stage in range(len(degrees) - 1):
        crossing = found[stage].behind
        assert crossing == found[stage + 1].before
        sent, received, *rest = counted(plan, stage, 4)
        assert (crossing.sent, crossing.received) == pytest.approx((sent, received))
        assert [crossing.sent_messages, crossing.received_messages, crossing.across] == rest


def test_equal_stages_hand_on_what_they_have():
    (first, second) = placements_of(make_plan([(4, 2), (4, 2)]), 16)
    assert first.behind.sent == first.behind.received == first.share == second.share == 1.0
    assert (first.behind.sent_messages, first.behind.received_messages) == (1, 1)
    assert (first.behind.across, first.behind.sharing, first.behind.receiving) == (False, 0.0, 0.0)
    assert first.before is None
    assert second.behind is None


def test_more_ranks_receive_less_each_but_a_sender_sends_it_all():
    first, second = placements_of(make_plan([(1, 1), (4, 1)]), 8)
    assert (first.share, second.share) == (1.0, 0.25)
    assert (first.behind.sent, first.behind.sent_messages) == (1.0, 4)
    assert (first.behind.received, first.behind.received_messages) == (0.25, 1)


def test_groups_and_the_nodes_that_they_span():
    # Stages of four devices lie in two nodes each.
    first, second = placements_of(make_plan([(4, 1), (4, 1)]), 2)
    assert (first.shard_nodes, second.shard_nodes, first.tied_nodes) == (2, 2, 2)
    assert first.behind.across
    # With replicas in one node each ranks with the same parameters lie in all.
    first, second = placements_of(make_plan([(4, 1), (4, 1)], layout=rank_layouts([(4, 1), (4, 1)], 2)[1]), 2)
    assert (first.shard_nodes, second.shard_nodes, first.tied_nodes) == (4, 4, 1)
    assert not first.behind.across
    # Two stages of two devices on two nodes: each stage in a node of its own.
    first, second = placements_of(make_plan([(1, 2), (1, 2)]), 2)
    assert (first.shard_nodes, second.shard_nodes, first.tied_nodes) == (1, 1, 2)
    assert first.behind.across
    assert first.behind.sharing == 1.0
    # Four stages on two nodes: of three boundaries one crosses, and one device of two sends over it.
    middle = placements_of(make_plan([(1, 1)] * 4), 2)
    assert [item.behind.across for item in middle[:-1]] == [False, True, False]
    assert middle[0].behind.sharing == 0.5
    # A stage of three devices lies partly in another node.
    mixed = placements_of(make_plan([(3, 1), (1, 1)]), 2)
    assert mixed[0].shard_nodes == 2
    assert mixed[1].shard_nodes == 1


def test_each_end_has_a_crowd_of_its_own():
    # Eight devices of a node send to four of another, of whom the other four receive nothing from elsewhere.
    first, middle, _ = placements_of(make_plan([(8, 1), (1, 4), (1, 4)]), 8)
    assert (first.behind.across, middle.behind.across) == (True, False)
    assert (first.behind.sent, first.behind.sharing) == (0.5, 1.0)
    assert (first.behind.received, first.behind.receiving) == (1.0, 0.5)
    assert (middle.behind.sharing, middle.behind.receiving) == (1.0, 0.5)


def test_rings():
    (only,) = placements_of(make_plan([(1, 2)], context=4), 8)
    assert (only.ring_nodes, only.shard_nodes, only.share) == (1, 1, 0.25)
    (only,) = placements_of(make_plan([(1, 2)], context=4), 4)
    assert (only.ring_nodes, only.shard_nodes) == (2, 2)
    (only,) = placements_of(make_plan([(2, 1)], context=2), 2)
    assert (only.ring_nodes, only.shard_nodes) == (1, 2)
