from dataclasses import replace

import pytest

from lightning_mist.hardware import Cluster, Device, host_memory, parse_cluster
from lightning_mist.hardware.catalog.devices import DEVICES


@pytest.mark.parametrize(
    ("text", "gib"), [("4x8xL4", 768), ("1x2xL4", 192), ("1x8xA100-40", 1152), ("1x8xV100-16", 488), ("RTX4090", 64)]
)
def test_the_catalog_knows_what_nodes_have_for_each_device(text, gib):
    assert host_memory(parse_cluster(text)) == gib * 2**30


def test_what_is_described_or_measured_counts():
    assert host_memory(replace(parse_cluster("4x8xL4"), host_memory_bytes=5)) == 5


def test_of_what_nobody_describes_nothing_is_known():
    unknown = Device(name="of tomorrow", memory_bytes=2**40)
    assert host_memory(Cluster(num_nodes=1, devices_per_node=8, device=unknown)) is None
    assert host_memory(parse_cluster("2xcpu:8GiB")) is None


def test_hosts_of_the_catalog_have_more_memory_than_their_devices():
    for device in DEVICES:
        if device.memory_bytes is not None and device.host_memory_bytes is not None:
            assert device.memory_bytes < device.host_memory_bytes < 2**39
        else:
            assert device.kind == "cpu"
