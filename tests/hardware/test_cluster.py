import pytest

from lightning_mist.errors import PlanError
from lightning_mist.hardware import Cluster, Device, HostLink, Link

DEVICE = Device(name="L4", memory_bytes=2**34)


def test_world_size() -> None:
    assert Cluster(num_nodes=4, devices_per_node=8, device=DEVICE).world_size == 32


@pytest.mark.parametrize(("nodes", "devices"), [(0, 8), (1, 0), (-1, 1)])
def test_counts_are_positive(nodes: int, devices: int) -> None:
    with pytest.raises(PlanError, match=f"{nodes} nodes x {devices}: both must be at least 1"):
        Cluster(num_nodes=nodes, devices_per_node=devices, device=DEVICE)


@pytest.mark.parametrize("nodes", [125_001, 10**400])
def test_nobody_has_so_many_devices(nodes: int) -> None:
    with pytest.raises(PlanError, match=r"a cluster of 1[\d,]+ devices: nothing is planned for more than 1,000,000"):
        Cluster(num_nodes=nodes, devices_per_node=8, device=DEVICE)


def test_hosts_have_memory() -> None:
    with pytest.raises(PlanError, match="hosts with 0 bytes of memory: a host has some; leave it out"):
        Cluster(num_nodes=1, devices_per_node=1, device=DEVICE, host_memory_bytes=0)


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 1e-6), (1e9, -1e-6), (float("inf"), 0.0), (1e9, float("nan"))])
def test_links_have_sensible_figures(rate: float, latency: float) -> None:
    with pytest.raises(PlanError, match="the rate must be positive"):
        Link(bytes_per_second=rate, latency_seconds=latency)


@pytest.mark.parametrize(
    "rates", [(0.0, 1e9, 0.0), (1e9, float("inf"), 0.0), (1e9, 1e9, -1.0), (1e9, 1e9, float("nan"))]
)
def test_host_links_have_sensible_figures(rates: tuple[float, float, float]) -> None:
    names = ("to_device_bytes_per_second", "to_host_bytes_per_second", "node_bytes_per_second")
    with pytest.raises(PlanError, match="leave the node's out if it sets no limit"):
        HostLink(**dict(zip(names, rates, strict=True)))
