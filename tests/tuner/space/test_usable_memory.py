from dataclasses import replace

import pytest

from lightning_mist.hardware import USABLE_HOST_MEMORY, MixedCluster, parse_cluster
from lightning_mist.tuner.space.usable_memory import (
    USABLE_MEMORY,
    check_memory_limit,
    host_bytes_of_each,
    host_notes,
    tensor_share,
    usable_bytes,
)
from tests.specs import cluster


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_a_limit_a_share_of_the_memory_is_left(kind):
    assert usable_bytes(cluster(2, memory=1000, kind=kind), None) == USABLE_MEMORY * 1000


def test_a_limit_is_about_all_that_a_device_has_in_use():
    assert usable_bytes(cluster(2, kind="cpu"), 500) == 500
    assert usable_bytes(cluster(2, kind="cuda"), 500) == USABLE_MEMORY * 500
    assert tensor_share(cluster(2, kind="cuda")) == USABLE_MEMORY


@pytest.mark.parametrize("limit", [0, -1, 2001])
def test_no_more_than_a_device_has_can_be_allowed(limit):
    parts = tuple(cluster(1, memory=memory, kind="cuda") for memory in (1000, 2000))
    mixed = MixedCluster(parts=parts, link=None)
    with pytest.raises(ValueError, match=r"more than nothing and at most the 2\.0 KiB of a device; leave it out"):
        check_memory_limit(mixed, limit)
    check_memory_limit(mixed, 2000)
    check_memory_limit(mixed, None)


def test_devices_share_what_is_used_of_their_host():
    assert host_bytes_of_each(parse_cluster("4x8xL4"), None) == USABLE_HOST_MEMORY * 96 * 2**30
    described = replace(cluster(4, nodes=2, kind="cuda"), host_memory_bytes=1000)
    assert host_bytes_of_each(described, None) == USABLE_HOST_MEMORY * 500
    assert host_bytes_of_each(described, 3000) == 1500


def test_unlike_devices_have_the_least_of_their_hosts():
    parts = [replace(cluster(2, kind="cuda"), host_memory_bytes=size) for size in (1000, 3000)]
    assert host_bytes_of_each(MixedCluster(parts=tuple(parts)), None) == USABLE_HOST_MEMORY * 500
    assert (
        host_bytes_of_each(MixedCluster(parts=(parts[1], cluster(1, kind="cuda"))), None) == USABLE_HOST_MEMORY * 1500
    )


def test_without_any_knowledge_host_memory_is_unlimited_and_a_note_says_so():
    unknown = cluster(2, kind="cuda")
    assert host_bytes_of_each(unknown, None) == float("inf")
    (note,) = host_notes(unknown, None)
    assert note.startswith("offload takes as much host memory as it wants: how much a node of 2 test has is not known")
    assert "host_memory_limit" in note
    assert "host_memory in the description" in note


def test_notes_say_what_limits_host_memory_and_where_it_is_from():
    assert list(host_notes(parse_cluster("4x8xL4"), None)) == [
        "host_memory_limit is 614.4 GiB per node, 80% of the catalog's 768.0 GiB of a node of 8 L4: the rest is for "
        "the system, the processes themselves and files that are written"
    ]
    described = replace(parse_cluster("1x2xL4"), host_memory_bytes=100 * 2**30)
    (note,) = host_notes(described, None)
    assert note.startswith("host_memory_limit is 80.0 GiB per node, 80% of 100.0 GiB of a node of 2 L4: the rest")
    assert not list(host_notes(described, 2**30))
    assert len(list(host_notes(parse_cluster("1x8xA100-40+2x8xV100-32+1x8xA100-40"), None))) == 2
    shared = replace(cluster(2, memory=2**30), host_memory_bytes=10 * 2**30)
    (note,) = host_notes(shared, None)
    assert note.startswith("host_memory_limit is 6.0 GiB per node, 80% of 10.0 GiB of a node of 2 test: the rest")
    assert note.endswith(", and the processes' tensors are taken off")
