import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.cost.inputs.arrays import prefix_sums
from lightning_mist.cost.inputs.regions import StageRegions, compile_regions
from lightning_mist.cost.time.region_times import (
    RegionSeconds,
    collective_seconds,
    interpolate,
    region_seconds,
    ring_steps,
)
from lightning_mist.errors import ProfileError
from tests.specs import cluster, profile, spec


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.5), (4, 3.5)])
def test_between_measured_sizes_seconds_are_linear(rows, seconds):
    assert interpolate((1, 2, 4), (1.0, 1.5, 3.5), rows) == seconds


@pytest.mark.parametrize("rows", [0.25, 0.5, 8, 64])
@pytest.mark.parametrize(("fixed", "each"), [(0.0, 1.0), (2.0, 0.5), (3.0, 0.0)])
def test_beyond_them_what_is_fixed_stays_and_the_rest_is_proportional(rows, fixed, each):
    measured = tuple(fixed + each * size for size in (1, 2, 4))
    assert interpolate((1, 2, 4), measured, rows) == pytest.approx(fixed + each * rows)


def test_a_small_disturbance_changes_what_lies_far_beyond_by_little():
    # The last two sizes alone would say 1.1 + 0.1 rows, and the first two 0.7 + 0.4 rows.
    found = interpolate((1, 2, 3, 4), (1.1, 1.5, 1.4, 1.5), 40)
    assert 3.0 < found < 1.5 * 40 / 4
    assert interpolate((1, 2, 4), (1.0, 2.0, 4.1), 8) == pytest.approx(8.2, rel=0.01)


def test_seconds_never_shrink_with_more_rows_nor_fall_below_nothing():
    # Four rows were measured faster than one, and faster than proportionally slower.
    assert interpolate((1, 4), (1.2, 1.0), 8) == pytest.approx(1.0)
    assert interpolate((1, 4), (1.2, 1.0), 0.5) == pytest.approx(1.2)
    assert interpolate((1, 2), (1.0, 3.0), 4) == pytest.approx(6.0)
    assert interpolate((2, 4), (1.0, 3.0), 1) == pytest.approx(0.5)
    assert interpolate((1, 2), (0.0, 0.0), 4) == 0.0


def test_a_single_size_is_a_lower_bound_below_it():
    assert interpolate((4,), (1.0,), 2) == 1.0
    assert interpolate((4,), (1.0,), 8) == 2.0


def test_measured_seconds_come_first():
    network = spec(3, kinds=(0, 1, 0), widths=(1000, 2000), measured=True)
    seconds = region_seconds(network, profile(), cluster(), compile_regions(network)(2), 2)
    np.testing.assert_allclose(seconds.forward_R, [2e-4, 2e-3, 4e-3, 2e-3, 6e-4])
    np.testing.assert_allclose(seconds.backward_R, [3e-4, 3e-3, 6e-3, 3e-3, 9e-4])
    assert seconds.source == "measured"


def test_beyond_the_measured_sizes_is_said():
    network = spec(3, measured=True)
    assert region_seconds(network, profile(), cluster(), compile_regions(network)(8), 8).source == "extrapolated"


def test_rates_where_nothing_was_measured():
    network = spec(1)
    machine = profile(flops_per_second=1e10, bytes_per_second=1e9)
    at = compile_regions(network)
    seconds = region_seconds(network, machine, cluster(), at(2), 2)
    # 2e8 FLOPs in 2 matrix products, so 1e8 each: two thirds of the way from 5e9 at 1e6 to 1e10 at 1e9.
    rate = 5e9 + 2 * 5e9 / 3
    assert seconds.forward_R[1] == pytest.approx(2e8 / rate + 60_000 / 1e9 + 20e-6)
    assert seconds.source == "rates"
    # On a device the host launches ahead.
    device = region_seconds(network, machine, cluster(kind="cuda"), at(2), 2)
    assert device.forward_R[1] == pytest.approx(2e8 / rate + 60_000 / 1e9)
    launching = dataclasses.replace(machine, operator_seconds=1.0)
    assert region_seconds(network, launching, cluster(kind="cuda"), at(2), 2).forward_R[1] == 20.0


def test_collectives():
    machine = profile(link=1e8, latency=1e-4)
    assert collective_seconds(machine, "all_reduce", 2, 1, 1e6) == pytest.approx(1e-4 + 1e-2)
    np.testing.assert_allclose(collective_seconds(machine, "broadcast", 2, 1, [0.0, 1e8]), [0.0, 1.0001])
    assert collective_seconds(machine, "all_reduce", 1, 1, 1e6) == 0.0
    assert collective_seconds(machine, "reduce", 2, 1, 1e6) == collective_seconds(machine, "broadcast", 2, 1, 1e6)


def test_other_group_sizes_follow_a_ring():
    machine = profile(link=1e8, latency=1e-4)
    # Three times the steps; each link carries 3/4 of the payload instead of 1/2.
    assert collective_seconds(machine, "all_reduce", 4, 1, 1e8) == pytest.approx(3e-4 + 1.5)
    # A message between two ranks is one, however many others there are.
    assert collective_seconds(machine, "send_recv", 2, 1, 1e8) == pytest.approx(1e-4 + 1.0)


@pytest.mark.parametrize(
    ("operation", "size", "expected"),
    [
        ("all_gather", 2, (1, 1 / 2)),
        ("all_gather", 8, (7, 7 / 8)),
        ("reduce_scatter", 4, (3, 3 / 4)),
        ("all_reduce", 2, (2, 1)),
        ("all_reduce", 8, (14, 14 / 8)),
        ("broadcast", 8, (7, 1)),
        ("reduce", 4, (3, 1)),
        ("send_recv", 2, (1, 1)),
    ],
)
def test_steps_of_a_ring(operation, size, expected):
    assert ring_steps(operation, size) == expected


def test_a_broadcast_goes_over_each_link_once_however_many_ranks_there_are():
    machine = profile(link=1e8, latency=1e-4)
    assert collective_seconds(machine, "broadcast", 4, 1, 1e8) == pytest.approx(3e-4 + 1.0)
    assert collective_seconds(machine, "reduce", 8, 1, 1e8) == pytest.approx(7e-4 + 1.0)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    # Bytes per second of a link, as nccl-tests defines its bus bandwidth.
    link, payload = 1e9, 1e8
    machine = profile(latency=0.0)
    per_link = {"all_reduce": 2 * 7 / 8, "all_gather": 7 / 8, "reduce_scatter": 7 / 8}
    costs = tuple(
        dataclasses.replace(item, group_size=8, bytes_per_second=link / per_link[item.operation])
        for item in machine.collectives
        if item.operation in per_link
    )
    machine = dataclasses.replace(machine, collectives=costs)
    for size in (2, 4, 8, 16):
        whole, *parts = (float(collective_seconds(machine, operation, size, 1, payload)) for operation in per_link)
        assert whole == pytest.approx(sum(parts))
        assert whole == pytest.approx(2 * (size - 1) / size * payload / link)


@given(
    operation=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send_recv"]),
    size=st.integers(2, 64),
    payload=st.floats(1.0, 1e10),
    calls=st.integers(1, 100),
)
def test_collectives_grow_with_bytes_and_messages_and_small_ones_cost_their_latency(operation, size, payload, calls):
    machine = profile(link=1e8, latency=1e-4)

    def seconds(payload, calls):
        return float(collective_seconds(machine, operation, size, 1, payload, calls))

    assert seconds(payload, calls) <= seconds(2 * payload, calls) <= 2 * seconds(payload, calls)
    assert seconds(payload, calls) <= seconds(payload, calls + 1)
    assert seconds(payload, calls) >= calls * 1e-4
    assert seconds(0.0, calls) == 0.0


def test_the_nearest_measurement_counts():
    machine = profile(link=1e8)
    slow = dataclasses.replace(machine.collectives[0], num_nodes=2, bytes_per_second=1e6)
    machine = dataclasses.replace(machine, collectives=(*machine.collectives, slow))
    assert collective_seconds(machine, "all_reduce", 2, 2, 1e6) == pytest.approx(1.0001)
    assert collective_seconds(machine, "all_reduce", 2, 1, 1e6) == pytest.approx(1.01e-2)


def test_a_collective_that_was_not_measured_is_named():
    machine = dataclasses.replace(profile(), collectives=())
    with pytest.raises(ProfileError, match="no all_reduce among 2 devices; it has nothing"):
        collective_seconds(machine, "all_reduce", 2, 1, 1.0)


def test_prefix_sums_count_what_lies_before():
    assert prefix_sums(np.array([2.0, 3.0, 5.0])).tolist() == [0.0, 2.0, 5.0, 10.0]
    assert prefix_sums(np.array([])).tolist() == [0.0]


def test_sums_of_regions():
    forward, backward, share = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 7.0]), np.array([0.0, 0.5, 1.0])
    costs = SimpleNamespace(weight_flops_R=4 * share, backward_flops_R=np.full(3, 4.0))
    directions = {"forward_R": forward, "backward_R": backward, "recompute_R": forward}
    compute = RegionSeconds(**directions, source="rates", exchange=(forward / 2, backward))
    # The only layer is region 1, between the head and the tail.
    some = StageRegions(
        low_K=np.array([0, 0]), high_K=np.array([3, 3]), first_K=np.array([1, 1]), middle_K=np.array([1, 2])
    )
    found = compute.terms(costs, some)
    assert (found["recompute_K"].tolist(), found["weight_K"].tolist()) == ([0.0, 2.0], [9.5, 9.5])
    assert found["exchange_K"].tolist() == [18.5, 18.5]
    assert found["recompute_exchange_K"].tolist() == [0.0, 1.0]
    alone = RegionSeconds(**directions, source="rates").terms(costs, some)
    assert [alone[name].tolist() for name in ("exchange_K", "recompute_exchange_K")] == [[0.0, 0.0]] * 2
