from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_mist.estimate import Estimator, estimate_plan
from lightning_mist.estimate.estimate_data import HostNeed
from lightning_mist.estimate.plan_estimate import host_need
from lightning_mist.hardware import MixedCluster, parse_cluster
from lightning_mist.plan import OffloadRatios, plan_of
from tests.specs import spec

GIB = 2**30
NETWORK = spec(8, parameter_bytes=40_000_000)


def nodes(count, devices, host_bytes):
    return replace(parse_cluster(f"{count}x{devices}xL4"), host_memory_bytes=host_bytes)


def plan(world_size, **more):
    offload = OffloadRatios(optimizer=1.0)
    return plan_of(8, world_size=world_size, global_batch_size=16, offload=offload, **more)


def held(*sizes):
    return [SimpleNamespace(host_bytes=size) for size in sizes]


def test_the_processes_of_a_node_share_its_memory():
    need = host_need(nodes(2, 2, 1000), plan(4, pipeline_stages=4), held(10, 30, 50, 5))
    assert need == HostNeed(bytes=55, usable=800, there=1000)


def test_of_unlike_nodes_that_one_counts_which_has_least_left():
    cluster = MixedCluster(parts=(nodes(1, 2, 1000), nodes(2, 1, 100)))
    need = host_need(cluster, plan(4, pipeline_stages=4), held(20, 20, 20, 20))
    assert need == HostNeed(bytes=20, usable=80, there=100)


def test_nothing_is_said_without_offload_or_of_unknown_hosts():
    assert host_need(nodes(1, 4, 1000), plan(4), held(0)) is None
    assert host_need(parse_cluster("4xcuda:8GiB"), plan(4), held(100)) is None


def test_nothing_is_said_of_cpus_which_offload_into_files():
    assert host_need(replace(parse_cluster("4xcpu:8GiB"), host_memory_bytes=1000), plan(4), held(100)) is None


@pytest.mark.parametrize(
    ("share", "verdict", "words"),
    [
        (0.5, "fits", "It fits in the"),
        (0.9, "tight", "That is tight in the"),
        (1.1, "does not fit", "It does not fit in the"),
    ],
)
def test_the_verdict_counts_host_memory(share, verdict, words):
    most = estimate_plan(Estimator(NETWORK, nodes(1, 2, 100 * GIB), 22 * GIB), plan(2)).host.bytes
    found = estimate_plan(Estimator(NETWORK, nodes(1, 2, round(most / share)), 22 * GIB), plan(2))
    assert found.verdict == verdict
    assert found.device_verdict == "fits"
    assert found.fits() == (verdict == "fits")
    assert words in found.headline()
