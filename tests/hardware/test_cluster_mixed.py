from dataclasses import replace

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.hardware import Cluster, Device, Link, MixedCluster, cluster_of, parse_cluster, single

FAST = Cluster(num_nodes=1, devices_per_node=8, device=Device(name="A100-40", memory_bytes=40 * 10**9))
SLOW = Cluster(num_nodes=2, devices_per_node=4, device=Device(name="V100-32", memory_bytes=32 * 10**9))


def test_ranks_of_parts_follow_each_other() -> None:
    mixed = MixedCluster(parts=(FAST, SLOW))
    assert (mixed.world_size, mixed.num_nodes, mixed.devices_per_node, mixed.kind) == (16, 3, 4, "cuda")
    assert mixed.offsets == (0, 8)
    assert [mixed.part_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert MixedCluster(parts=(SLOW, FAST)).offsets == (0, 8)
    assert MixedCluster(parts=(SLOW, FAST, SLOW)).offsets == (0, 8, 16)


def test_one_part_is_plain() -> None:
    assert cluster_of([FAST]) == FAST
    assert (FAST.parts, FAST.offsets, FAST.part_of(5)) == ((FAST,), (0,), 0)
    with pytest.raises(PlanError, match="a mixed cluster of 1 parts: it has at least 2"):
        MixedCluster(parts=(FAST,))


def test_alike_neighbours_are_one_part_unless_a_link_lies_between() -> None:
    assert cluster_of([FAST, FAST]) == replace(FAST, num_nodes=2)
    assert cluster_of([FAST, SLOW, SLOW]) == MixedCluster(parts=(FAST, replace(SLOW, num_nodes=4)))
    link = Link(bytes_per_second=1e9, latency_seconds=1e-3)
    assert cluster_of([FAST, FAST], link) == MixedCluster(parts=(FAST, FAST), link=link)


def test_kinds_do_not_mix() -> None:
    with pytest.raises(PlanError, match=r"1x8xA100-40\+1x2xcpu has devices of kinds cuda, cpu"):
        cluster_of([FAST, parse_cluster("2xcpu:8GiB")])


def test_what_needs_one_kind_says_so() -> None:
    assert single(FAST, "a measured profile") == FAST
    with pytest.raises(PlanError, match="a measured profile needs devices of one kind; name one of its parts"):
        single(MixedCluster(parts=(FAST, SLOW)), "a measured profile")
