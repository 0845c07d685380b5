import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.regions import compile_regions
from lightning_mist.cost.time import collective_seconds, interpolate, region_seconds
from lightning_mist.errors import ProfileError
from tests.specs import cluster, profile, spec


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(1, 1.0), (2, 1.5), (3, 2.5), (4, 3.5), (8, 7.0), (0.5, 1.0)],
)
def test_interpolation(rows, seconds):
    assert interpolate((1, 2, 4), (1.0, 1.5, 3.5), rows) == seconds


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
