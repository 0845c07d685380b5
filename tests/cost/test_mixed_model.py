from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import MixedCostModel, StageCostModel, cost_model, predict
from lightning_mist.cost.inputs.candidates import StageCandidates, StageSlot, placed_slots_of, slots_of
from lightning_mist.cost.inputs.placement import Nodes, parts_of, placements_of
from lightning_mist.errors import PlanError, ProfileError
from lightning_mist.hardware import Link, MixedCluster, catalog_profile, parse_cluster
from tests.plans import plan_of
from tests.specs import cluster, profile, spec, with_splits

NETWORK = spec(4, tied=True, parameter_bytes=4_000_000, widths=(200_000,))
MIXED = parse_cluster("2xA100-40+2xL4")
EQUAL = MixedCluster(parts=(parse_cluster("2xL4"), parse_cluster("2xL4")))


def make_plan(*stages, zero=0, microbatches=4, rows=8, schedule="1f1b"):
    """Stages of ``(layers, devices, tensor-parallel degree)``."""
    made = [
        {"layers": layers, "devices": devices, "tensor": tensor, "zero": zero if len(devices) > tensor else 0}
        for layers, devices, tensor in stages
    ]
    return plan_of(rows, microbatches, *made, schedule=schedule)


TWO = make_plan((1, (0, 1), 1), (3, (2, 3), 1))
PLANS = (
    TWO,
    make_plan((3, (2, 3), 1), (1, (0, 1), 1), zero=1),
    make_plan((1, (0,), 1), (1, (1,), 1), (1, (2,), 1), (1, (3,), 1)),
    make_plan((1, (0,), 1), (1, (1,), 1), (2, (2, 3), 1), zero=2),
    make_plan((4, (0, 1, 2, 3), 1), zero=3, microbatches=2),
    make_plan((2, (0, 2), 1), (2, (1, 3), 1)),
)
"""On four devices; the last one has stages that lie in both halves."""


@pytest.mark.parametrize("plan", PLANS[:-1])
def test_equal_parts_are_one_machine(plan):
    whole = parse_cluster("2x2xL4")
    assert predict(NETWORK, None, EQUAL, plan) == predict(NETWORK, catalog_profile(whole), whole, plan)


@pytest.mark.parametrize(("plan", "parts"), [(TWO, [0, 1]), (PLANS[1], [1, 0])])
def test_stages_have_the_seconds_of_their_part(plan, parts):
    model = cost_model(NETWORK, None, MIXED)
    slots = slots_of(plan, MIXED)
    assert [slot.part for slot, _ in slots] == parts
    for slot, one in slots:
        part = MIXED.parts[slot.part]
        found, alone = model.seconds(slot, one), StageCostModel(NETWORK, catalog_profile(part), part).seconds(slot, one)
        for name in ("forward_K", "backward_K", "reduce_K", "update_K", "once_K"):
            assert getattr(found, name) == getattr(alone, name), name


def test_the_only_stage_is_as_slow_as_the_slowest_part():
    model = cost_model(NETWORK, None, MIXED)
    ((slot, one),) = slots_of(PLANS[4], MIXED)
    assert slot.parts == ()
    slow = replace(MIXED.parts[1], num_nodes=2)
    alone = StageCostModel(NETWORK, catalog_profile(slow), slow).seconds(slot, one)
    assert model.seconds(slot, one).steady_K[0] >= alone.steady_K[0]
    assert model.seconds(slot, one).forward_K == alone.forward_K
    assert len(model.models(slot)) == 2


@pytest.mark.parametrize("placed", [True, False])
def test_what_crosses_to_another_part_goes_at_the_slower_end_s_rate(placed):
    ends = [catalog_profile(replace(part, num_nodes=2)) for part in MIXED.parts]
    rates = [item for end in ends for item in end.collectives if item.operation == "send_recv" and item.num_nodes == 2]
    # A row hands on 200 kB.
    slowest = max(item.latency_seconds + 200_000 / item.bytes_per_second for item in rates)
    (slot, one), _ = placed_slots_of(TWO, MIXED) if placed else slots_of(TWO, MIXED)
    seconds = cost_model(NETWORK, None, MIXED).seconds(slot, one)
    assert seconds.return_K[0] == pytest.approx(slowest, rel=0.2)
    alone = cost_model(NETWORK, None, MIXED.parts[0]).seconds(replace(slot, parts=(), placement=None), one)
    assert seconds.return_K[0] > 2 * alone.return_K[0]


def test_a_link_between_parts_counts_for_what_crosses_it_alone():
    slow = MixedCluster(parts=MIXED.parts, link=Link(bytes_per_second=1e6, latency_seconds=1e-3))
    plan = PLANS[3]
    for (slot, one), crosses, is_end in zip(placed_slots_of(plan, MIXED), (False, True, True), (1, 0, 1), strict=True):
        before, now = (cost_model(NETWORK, None, item).seconds(slot, one) for item in (MIXED, slow))
        assert bool(now.transfer_K > before.transfer_K) == crosses
        assert now.forward_K == before.forward_K
        assert now.reduce_K == before.reduce_K
        # Embedding and projection are tied, and lie in different parts.
        assert bool(now.tied_K > before.tied_K) == bool(is_end)


def test_a_measured_link_is_of_a_pair_with_all_devices_of_the_node_busy():
    parts = (cluster(2, kind="cuda"), cluster(2, kind="cuda"))
    mixed = MixedCluster(parts=parts, link=Link(bytes_per_second=2e6, latency_seconds=0.5))
    slot, one = slots_of(TWO, mixed)[1]
    found = MixedCostModel(NETWORK, (profile(), profile()), mixed).seconds(slot, one)
    assert found.arrival_K[0] == pytest.approx(0.5 + 200_000 / 1e6)


@pytest.mark.parametrize("plan", PLANS[:-1])
@pytest.mark.parametrize("part", [0, 1])
def test_a_faster_part_never_makes_a_plan_slower(plan, part):
    fast, slow = profile(flops_per_second=3e10, bytes_per_second=4e9, link=3e8), profile()
    parts = (cluster(2, kind="cuda"), cluster(2, kind="cuda"))
    before = predict(NETWORK, (slow, slow), MixedCluster(parts=parts), plan)
    profiles = (fast, slow) if part == 0 else (slow, fast)
    assert predict(NETWORK, profiles, MixedCluster(parts=parts), plan).step_seconds <= before.step_seconds


def test_a_stage_of_a_pipeline_lies_in_one_part():
    with pytest.raises(PlanError, match=r"stages\[0\] has devices in parts \[0, 1\] of the cluster"):
        predict(NETWORK, None, MIXED, PLANS[-1])


def test_layers_are_shared_within_nodes_of_the_part_or_over_whole_ones():
    alone = parse_cluster("2x2xA100-40+2xL4")
    plan = make_plan((1, (0, 1, 2), 3), (1, (3,), 1), (2, (4, 5), 1))
    with pytest.raises(PlanError, match=r"stages\[0\] has tensor_parallel_degree 3 with 2 devices per node"):
        predict(NETWORK, None, alone, plan)


def test_profiles_are_of_one_kind_of_device():
    one = catalog_profile(MIXED.parts[0])
    with pytest.raises(ProfileError, match=r"1 profile \(A100-40\) for the 2 parts of 1x2xA100-40\+1x2xL4"):
        cost_model(NETWORK, one, MIXED)
    with pytest.raises(ProfileError, match=r"2 profiles .* for the 1 parts of 1x2xA100-40"):
        cost_model(NETWORK, (one, one), MIXED.parts[0])
    both = cost_model(NETWORK, (one, catalog_profile(MIXED.parts[1])), MIXED)
    assert both.seconds(*slots_of(TWO, MIXED)[0]).forward_K > 0


def test_measured_layers_are_of_one_kind_of_device():
    with pytest.raises(ProfileError, match="synthetic with measured seconds on 1x2xA100-40"):
        cost_model(spec(4, measured=True), None, MIXED)


def test_devices_are_placed_part_by_part():
    nodes = Nodes.of(parse_cluster("2x2xA100-40+4xL4"))
    assert [nodes.place(device) for device in (0, 1, 2, 4, 7)] == [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0)]
    assert parts_of(TWO, MIXED) == (0, 1)
    first, second = placements_of(TWO, MIXED)
    assert first.behind.across
    assert second.before.across


def test_work_and_roofline_of_unlike_devices():
    found = predict(NETWORK, None, MIXED, TWO).work
    each = [predict(NETWORK, None, item, make_plan((4, (0, 1), 1))).work for item in MIXED.parts]
    assert found.model_flops == each[0].model_flops
    assert found.peak_flops_per_second == np.mean([item.peak_flops_per_second for item in each])
    combined = 1 / sum(1 / item.roofline_seconds for item in each)
    # Operators that suit one kind better could all run there.
    assert 0.5 * combined < found.roofline_seconds <= combined * (1 + 1e-12)


@pytest.mark.parametrize("text", ["1x8xA100-40+1x8xA10G", "1x8xA10G+1x4xL4", "1x4xH100+1x8xA100-40+1x2xL4"])
@pytest.mark.parametrize(("devices", "tensor"), [(1, 1), (2, 1), (4, 2)])
def test_what_crosses_to_another_part_takes_as_long_in_a_search_as_in_a_plan_of_stages_that_are_alike(
    text, devices, tensor
):
    # Of parts of eight devices one, two or four use the network of their node, and not all of them.
    machine = parse_cluster(text)
    if any(part.world_size % devices for part in machine.parts):
        machine = replace(machine, parts=machine.parts[:2])
    ranks = range(machine.world_size)
    each = [tuple(ranks[first : first + devices]) for first in range(0, machine.world_size, devices)]
    network = with_splits(spec(len(each), widths=(4_000_000,)), (2, False))
    plan = make_plan(*((1, some, tensor) for some in each), rows=2 * devices // tensor, microbatches=2)
    model = cost_model(network, None, machine)
    crossed = 0
    for (slot, one), (placed, _) in zip(slots_of(plan, machine), placed_slots_of(plan, machine), strict=True):
        assert model.seconds(slot, one).steady_K == pytest.approx(model.seconds(placed, one).steady_K)
        crossed += any(slot.seams[:2])
    assert crossed == 2 * (len(machine.parts) - 1)


def test_slots_know_their_part():
    slot = StageSlot(
        stage_index=1,
        num_stages=3,
        num_microbatches=2,
        data_parallel_degree=1,
        rows=1,
        batch_rows=1,
        parts=(0, 0, 1),
    )
    assert (slot.part, slot.devices, slot.seam(0, 1), slot.seam(1, 2)) == (0, 1, None, (0, 1))
    one = StageCandidates(
        start_K=np.array([1]), end_K=np.array([2]), checkpointed_K=np.array([0]), zero_stage_K=np.array([0])
    )
    assert cost_model(NETWORK, None, MIXED).seconds(slot, one).steady_K[0] > 0
