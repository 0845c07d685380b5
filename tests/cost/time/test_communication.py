import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import MemoryModel, StageCandidates, StageCostModel
from lightning_mist.cost.inputs.candidates import placed_slots_of, slots_of
from lightning_mist.cost.time.communication import cut_seconds, reductions, shard_nodes
from lightning_mist.cost.time.overlap import FREE
from lightning_mist.plan.sharding import BUCKET_BYTES
from tests.cost.inputs.test_placement import make_plan
from tests.specs import cluster, profile, spec

NETWORK = spec(2)


def machine(*, inside=1e9, across=1e8, latency=1e-4):
    """A machine whose pairs in different nodes are slower."""
    made = profile(link=inside, latency=latency)
    between = tuple(dataclasses.replace(item, num_nodes=2, bytes_per_second=across) for item in made.collectives)
    return dataclasses.replace(made, collectives=(*made.collectives, *between))


def transfers(hardware, place, slot, candidates, memory, *, sending=False):
    """Seconds of receiving, or of sending, at both ends of stages."""
    activation_seconds, gradient_seconds = cut_seconds(hardware, place, slot, memory, sending=sending, seams=())
    begin, end = candidates.start_K, candidates.end_K
    if sending:
        return activation_seconds[end], gradient_seconds[begin]
    return activation_seconds[begin], gradient_seconds[end]


def crossing(degrees, devices_per_node=8, *, hardware=None, kind="cuda", sending=False, network=NETWORK):
    """Seconds of receiving the input of the second of two stages, and the gradient of the first one's output."""
    plan = make_plan(degrees)
    hardware = hardware or machine()
    place = cluster(plan.world_size, nodes=max(1, plan.world_size // devices_per_node), kind=kind)
    memory = MemoryModel(network)
    found = [
        transfers(hardware, place, slot, candidates, memory, sending=sending)
        for slot, candidates in placed_slots_of(plan, devices_per_node)
    ]
    none, there = (1, 0) if sending else (0, 1)
    assert found[none][0][0] == found[there][1][0] == 0.0
    return float(found[there][0][0]), float(found[none][1][0])


def test_equal_stages_send_one_message():
    # Two ranks with a row each; a row hands on 1000 bytes.
    assert crossing([(2, 1), (2, 1)]) == pytest.approx((1e-4 + 1000 / 1e9,) * 2)


def test_where_a_stage_has_fewer_ranks_they_send_and_receive_the_rows_of_all():
    for degrees in ([(4, 1), (1, 1)], [(1, 1), (4, 1)]):
        # Four rows in all, whoever has them, in four messages.
        assert crossing(degrees) == pytest.approx((4e-4 + 4 * 1000 / 1e9,) * 2)


def test_on_a_cpu_each_end_works_for_what_it_moves_itself():
    for sending in (False, True):
        ends = crossing([(4, 1), (1, 1)], kind="cpu", sending=sending)
        few, many = 4e-4 + 4 * 1000 / 1e9, 1e-4 + 1000 / 1e9
        # The single rank behind receives rows and sends gradients of all; each of the four in front has its own.
        assert ends == pytest.approx((many, few) if sending else (few, many))


def test_tensor_parallel_ranks_get_a_whole_each():
    assert crossing([(1, 2), (1, 2)]) == pytest.approx((1e-4 + 1000 / 1e9,) * 2)
    # A single sender serves four.
    assert crossing([(1, 1), (1, 4)]) == pytest.approx((4e-4 + 4 * 1000 / 1e9,) * 2)


def test_stages_share_the_network_between_nodes():
    # All devices of a node send to the other: each gets what was measured with all of them sending.
    assert crossing([(1, 2), (1, 2)], 2) == pytest.approx((1e-4 + 1000 / 1e8,) * 2)
    # One of four does, and has it to itself.
    plan = make_plan([(1, 1)] * 8)
    hardware = machine()
    memory = MemoryModel(spec(8))
    found = [
        float(transfers(hardware, cluster(8, nodes=2), slot, some, memory)[0][0])
        for slot, some in placed_slots_of(plan, 4)
    ]
    inside = 1e-4 + 1000 / 1e9
    assert found == pytest.approx([0.0, inside, inside, inside, 1e-4 + 250 / 1e8, inside, inside, inside])
    # But no more than it can send.
    fast = dataclasses.replace(hardware, collectives=machine(inside=1.5e8, across=1e8).collectives)
    seconds = transfers(fast, cluster(8, nodes=2), *placed_slots_of(plan, 4)[4], memory)[0][0]
    assert seconds == pytest.approx(1e-4 + 1000 / 1.5e8)


def test_stages_of_a_search_pay_for_the_mean_boundary():
    hardware, memory, inside, across = machine(), MemoryModel(spec(8)), 1e-4 + 1000 / 1e9, 1e-4 + 250 / 1e8
    slot, some = slots_of(make_plan([(1, 1)] * 8))[3]
    # One boundary in four leaves a node of four, where one of four devices has the network to itself.
    assert transfers(hardware, cluster(8, nodes=2), slot, some, memory)[0][0] == pytest.approx(
        inside + (across - inside) / 4
    )
    assert transfers(hardware, cluster(8, nodes=1), slot, some, memory)[0][0] == pytest.approx(inside)
    # Of stages of two devices every other boundary does, and both send over it.
    wide = dataclasses.replace(slot, data_parallel_degree=2)
    halfway = across + (across - 1e-4)
    assert transfers(hardware, cluster(8, nodes=2), wide, some, memory)[0][0] == pytest.approx(
        inside + (halfway - inside) / 2
    )
    # Stages that fill nodes have all their neighbours in others.
    split = dataclasses.replace(slot, tensor_parallel_degree=4)
    assert transfers(hardware, cluster(16, nodes=4), split, some, memory)[0][0] == pytest.approx(1e-4 + 1000 / 1e8)


@pytest.mark.parametrize(
    ("degrees", "boundary", "part"), [([(8, 1), (1, 4), (1, 4)], 0, 1 / 2), ([(1, 4), (1, 4), (8, 1)], 1, 1 / 8)]
)
def test_a_crowd_at_one_end_does_not_hold_up_what_the_other_end_moves(degrees, boundary, part):
    # Four whole replicas' worth crosses from eight to four, a single one's from four to eight.
    plan, hardware = make_plan(degrees), machine(inside=1e12, latency=0.0)
    ends = [
        transfers(hardware, cluster(16, nodes=2, kind="cuda"), slot, some, MemoryModel(spec(3)))
        for slot, some in placed_slots_of(plan, 8)
    ]
    there, back = float(ends[boundary + 1][0][0]), float(ends[boundary][1][0])
    # A replica hands on 8 rows of 1000 bytes; the rate is that of each of eight.
    assert (there, back) == pytest.approx((part * 8000 / 1e8,) * 2)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_tensors_without_gradients_are_no_messages_on_the_way_back(kind):
    def with_mask(trained):
        (tensor,) = NETWORK.boundaries[0]
        mask = dataclasses.replace(tensor, requires_grad=False)
        output = dataclasses.replace(tensor, requires_grad=trained)
        return dataclasses.replace(NETWORK, boundaries=((output, mask),))

    there, back = crossing([(2, 1), (2, 1)], network=with_mask(True), kind=kind)
    assert (there, back) == pytest.approx((2e-4 + 2000 / 1e9, 1e-4 + 1000 / 1e9))
    there, back = crossing([(2, 1), (2, 1)], network=with_mask(False), kind=kind)
    assert there == pytest.approx(2e-4 + 2000 / 1e9)
    assert back == 0.0


def test_groups_are_where_the_plan_puts_them():
    place = cluster(8, nodes=4)
    plan = make_plan([(2, 1), (2, 2), (2, 1)])
    slots = [slot for slot, _ in placed_slots_of(plan, 2)]
    assert [shard_nodes(place, slot) for slot in slots] == [1, 2, 1]
    # Of a search they are taken to be in as few nodes as they can.
    assert [shard_nodes(place, slot) for slot, _ in slots_of(plan)] == [1, 2, 1]
    plan = make_plan([(2, 1), (1, 2)])
    assert [shard_nodes(cluster(4, nodes=2), slot) for slot, _ in placed_slots_of(plan, 2)] == [1, 1]
    assert [shard_nodes(cluster(4, nodes=2), slot) for slot, _ in slots_of(plan)] == [1, 1]
    (only,) = slots_of(make_plan([(4, 1)]))
    assert shard_nodes(cluster(4, nodes=2), only[0]) == 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_reduction_beside_a_backward_slows_it_down(share):
    hardware = dataclasses.replace(
        machine(inside=1e9, latency=0.0), interference=dataclasses.replace(FREE, compute_network=share)
    )
    uses = spec(2, edge_bytes=400 * 2**20)
    model = StageCostModel(uses, hardware, cluster(2, kind="cuda"))
    slot, _ = slots_of(make_plan([(2, 1)]))[0]
    every = StageCandidates(
        start_K=np.zeros(1, dtype=int),
        end_K=np.full(1, 2),
        checkpointed_K=np.zeros(1, dtype=int),
        zero_stage_K=np.zeros(1, dtype=int),
    )
    held = model.memory(slot).holdings.of(every)
    for backward in (0.1, 10.0):
        found = reductions(hardware, model.cluster, slot, every, held, np.array([backward]))
        whole = float(found.whole_K[0])
        assert whole == pytest.approx(held.trained_K[0] / 1e9)
        # Both advance at 1 / (1 + share) until the shorter one is done.
        short, long = sorted((whole, backward))
        both = short * (1 + share) + long - short
        last = whole * BUCKET_BYTES / held.trained_K[0]
        assert found.exposed_K[0] == pytest.approx(max(both - backward, last))
    on_cpu = reductions(hardware, cluster(2), slot, every, held, np.array([10.0]))
    assert on_cpu.exposed_K[0] == on_cpu.whole_K[0]
