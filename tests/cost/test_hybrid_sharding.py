"""What stages cost whose ranks shard within groups, against counting by hand and by what the runtime holds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.cost import MemoryModel, StageCostModel
from lightning_mist.cost.inputs.candidates import placed_slots_of
from lightning_mist.cost.inputs.placement import Nodes, placements_of
from lightning_mist.cost.time.communication import replicate_nodes, shard_nodes
from lightning_mist.cost.time.region_times import collective_seconds
from lightning_mist.estimate.replay.rank_replay import replay_plan
from lightning_mist.plan.mesh import make_mesh
from tests.cost.events import with_events
from tests.cost.time.test_communication import machine
from tests.plans import plan_of
from tests.specs import cluster, spec

NETWORK = spec(4, parameter_bytes=40_000)


def one_stage(data, *, shard=None, zero=3, tensor=1, microbatches=2, layers=4):
    stage = {"layers": layers, "data": data, "tensor": tensor, "shard": shard, "zero": zero}
    return plan_of(data * microbatches, microbatches, stage)


def only(plan, nodes):
    ((slot, candidates),) = placed_slots_of(plan, nodes)
    return slot, candidates


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_group_holds_what_it_would_alone(zero):
    model = MemoryModel(NETWORK)
    alone, hybrid = (
        model.peaks(*only(plan, 8))[0] for plan in (one_stage(2, zero=zero), one_stage(8, shard=2, zero=zero))
    )
    whole = model.peaks(*only(one_stage(8, zero=zero), 8))[0]
    assert hybrid == alone > whole


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_group_replays_as_it_would_alone(zero):
    network = with_events(spec(4))
    plan = one_stage(4, shard=2, zero=zero)
    (replay,), (alone,) = replay_plan(network, plan), replay_plan(network, one_stage(2, zero=zero))
    assert replay.peak_bytes == alone.peak_bytes


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("groups", "count"), [(2, 4), (4, 2)])
def test_a_group_takes_what_it_would_alone_and_then_owners_sum_over_groups(zero, groups, count):
    hardware, nodes = machine(inside=1e9, across=1e8), groups
    model = StageCostModel(NETWORK, hardware, cluster(groups * count, nodes=nodes))
    plan = one_stage(groups * count, shard=count, zero=zero)
    found = model.seconds(*only(plan, count))
    inside = StageCostModel(NETWORK, hardware, cluster(count)).seconds(*only(one_stage(count, zero=zero), count))
    for name in ("unshard_K", "scatter_K", "gather_K", "update_K", "steady_K"):
        assert getattr(found, name) == pytest.approx(getattr(inside, name)), name
    # By hand: what the rank that owns most owns, in a bucket, or in six units: head, four layers and tail.
    sizes = {item.name: item.bytes for item in NETWORK.parameters if item.trainable}
    meshes = [make_mesh(plan, rank, NETWORK.module_map) for rank in range(plan.world_size)]
    owned = [sum(sizes.get(item.name, 0) for item in mesh.owned) for mesh in meshes]
    assert {mesh.replicate_peers for mesh in meshes if mesh.rank % count == 0} == {
        tuple(range(0, groups * count, count))
    }
    between = collective_seconds(hardware, "all_reduce", groups, nodes, max(owned), 6 if zero > 1 else 1)
    assert found.reduce_K - inside.reduce_K == pytest.approx(between)
    assert between > 0


def test_sums_in_a_larger_type_take_longer_from_zero_2_on():
    optimizer = replace(NETWORK.optimizer, gradient_bytes_per_parameter_byte=2.0)
    wide = replace(NETWORK, optimizer=optimizer)
    hardware = machine(latency=0.0)
    for zero, factor in ((1, 1.0), (2, 2.0), (3, 2.0)):
        taken = []
        for network in (NETWORK, wide):
            both, alone = (
                StageCostModel(network, hardware, cluster(4, nodes=2)).seconds(*only(plan, 2)).reduce_K[0]
                for plan in (one_stage(4, shard=2, zero=zero), one_stage(2, zero=zero))
            )
            taken.append(both - alone)
        assert taken[1] == pytest.approx(factor * taken[0])


def test_between_nodes_groups_within_them_are_faster_where_layers_are_given_out():
    model = StageCostModel(NETWORK, machine(inside=1e10, across=1e7), cluster(8, nodes=2, kind="cuda"))
    whole, hybrid = (model.seconds(*only(plan, 4)) for plan in (one_stage(8), one_stage(8, shard=4)))
    assert hybrid.unshard_K[0] < 0.1 * whole.unshard_K[0]
    assert hybrid.steady_K[0] < whole.steady_K[0]


@given(st.data())
def test_nodes_of_groups_and_between_them(data):
    """Counted device by device; what a search takes for granted of stages that begin a node is the same."""
    tensor, groups, count = (data.draw(st.integers(low, 4)) for low in (1, 1, 2))
    per_node = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    plan = one_stage(groups * count, shard=count, tensor=tensor)
    (found,) = placements_of(plan, Nodes.of(per_node))
    nodes = [device // per_node for device in range(plan.world_size)]
    within, between = [], []
    for index in range(tensor):
        peers = nodes[index::tensor]
        within += [len(set(peers[first : first + count])) for first in range(0, len(peers), count)]
        between += [len(set(peers[place::count])) for place in range(count)]
    assert (found.shard_nodes, found.replicate_nodes) == (max(within), max(between))
    if plan.world_size % per_node:
        return
    place, (slot, _) = cluster(plan.world_size, nodes=plan.world_size // per_node), only(plan, per_node)
    guess = replace(slot, placement=None)
    assert shard_nodes(place, guess) >= shard_nodes(place, slot)
    assert replicate_nodes(place, guess) >= replicate_nodes(place, slot)
    if per_node % (count * tensor) == 0 or (count * tensor % per_node == 0 and per_node % tensor == 0):
        assert shard_nodes(place, guess) == shard_nodes(place, slot)


def test_groups_alike_in_all_but_their_number_are_not_taken_for_one_another():
    model = MemoryModel(NETWORK)
    peaks = [model.peaks(*only(one_stage(8, shard=shard), 8))[0] for shard in (2, 4, None)]
    assert np.all(np.diff(peaks) < 0)
