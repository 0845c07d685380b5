from dataclasses import replace

from lightning_mist.hardware import USABLE_HOST_MEMORY, usable_host_bytes
from tests.specs import cluster


def test_a_share_of_a_host_is_used():
    assert usable_host_bytes(replace(cluster(4, nodes=2, kind="cuda"), host_memory_bytes=1000)) == (
        USABLE_HOST_MEMORY * 1000
    )


def test_of_a_host_of_which_nothing_is_known_all_is_used():
    assert usable_host_bytes(cluster(2, kind="cuda")) == float("inf")


def test_of_a_cpu_s_host_only_what_its_processes_leave_is_used():
    assert usable_host_bytes(replace(cluster(2, memory=1000), host_memory_bytes=10_000)) == 6000
    assert usable_host_bytes(replace(cluster(2, memory=1000), host_memory_bytes=2000)) == 0
