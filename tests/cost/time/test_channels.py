import dataclasses

import pytest

from lightning_mist.cost.time.overlap import FREE, copy_rates, interference_of
from lightning_mist.errors import ProfileError
from tests.specs import cluster, profile

COPYING = dataclasses.replace(
    profile(bytes_per_second=4e9), host_to_device_bytes_per_second=3e9, device_to_host_bytes_per_second=1e9
)


def test_channels_of_a_cpu_take_turns_and_those_of_a_device_do_not():
    known = dataclasses.replace(profile(), interference=dataclasses.replace(FREE, compute_network=0.5))
    assert interference_of(known, cluster(kind="cpu")) is None
    assert interference_of(known, cluster(kind="cuda")) is known.interference
    assert interference_of(profile(), cluster(kind="cuda")) is FREE


def test_a_cpu_copies_within_memory():
    without = dataclasses.replace(COPYING, host_to_device_bytes_per_second=0.0, device_to_host_bytes_per_second=0.0)
    rates = copy_rates(without, cluster(kind="cpu"))
    assert (rates.to_device, rates.to_host) == (2e9, 2e9)


def test_a_cpu_copies_from_and_to_files_as_measured():
    rates = copy_rates(COPYING, cluster(kind="cpu"))
    assert (rates.to_device, rates.to_host) == (3e9, 1e9)


@pytest.mark.parametrize(("per_node", "expected"), [(0.0, (3e9, 1e9)), (8e9, (2e9, 1e9)), (2e9, (5e8, 5e8))])
def test_devices_share_what_their_node_copies(per_node, expected):
    shared = dataclasses.replace(COPYING, host_bytes_per_second_per_node=per_node)
    rates = copy_rates(shared, cluster(8, nodes=2, kind="cuda"))
    assert (rates.to_device, rates.to_host) == expected


def test_unknown_copies_of_a_device_are_named():
    with pytest.raises(ProfileError, match="the profile of test copies 0 bytes/s from the host"):
        copy_rates(profile(), cluster(kind="cuda"))
