"""What devices hold besides tensors: sources, orders and refusals."""

import pytest

from lightning_mist.hardware import Cluster, Device, Link
from lightning_mist.hardware.catalog.memory_overheads import (
    CONTEXTS,
    MIB,
    NOTHING,
    SOURCES,
    Overhead,
    communicator_overhead,
    context_overhead,
    has_nvlink,
    workspace_bytes,
)


def cluster(name: str, *, kind: str = "cuda", link: Link | None = None) -> Cluster:
    device = Device(name=name, memory_bytes=2**34, kind=kind)
    return Cluster(num_nodes=2, devices_per_node=4, device=device, intra_node=link)


def test_every_figure_has_a_source() -> None:
    figures = list(CONTEXTS.values())
    figures += [communicator_overhead(cluster(name), ranks) for name in ("A100-40", "L4") for ranks in (2, 8)]
    for figure in figures:
        assert set(figure.source.split(", ")) <= set(SOURCES)
        assert 0 < figure.expected < figure.high


def test_a_context_that_nobody_measured_is_the_largest_that_somebody_did() -> None:
    measured = CONTEXTS.values()
    found = context_overhead("B200")
    assert (found.expected, found.high) == (max(c.expected for c in measured), max(c.high for c in measured))
    assert "not known for B200" in found.source
    assert context_overhead("L4").expected == 751 * MIB


def test_workspaces_grew_with_hopper() -> None:
    assert workspace_bytes("NVIDIA A100-SXM4-40GB") == 8.125 * MIB
    assert workspace_bytes("H200") == workspace_bytes("a device of tomorrow") == 32 * MIB


def test_communicators_are_larger_over_nvlink_and_in_larger_groups() -> None:
    assert communicator_overhead(cluster("A100-40"), 2).expected == 544 * MIB
    assert communicator_overhead(cluster("A100-40"), 3).expected == 688 * MIB
    assert communicator_overhead(cluster("A100-40"), 800) == communicator_overhead(cluster("A100-40"), 3)
    assert communicator_overhead(cluster("L4"), 2).expected == 24 * MIB
    assert communicator_overhead(cluster("L4"), 4).expected == 48 * MIB


def test_communicators_of_few_channels_have_their_buffers_alone() -> None:
    assert communicator_overhead(cluster("A100-40"), 2, 4).expected == 48 * MIB
    assert communicator_overhead(cluster("L4"), 2, 4) == communicator_overhead(cluster("L4"), 2)


def test_links_are_the_clusters_own_where_described() -> None:
    assert has_nvlink(cluster("A100-40"))
    assert not has_nvlink(cluster("L4"))
    assert has_nvlink(cluster("L4", link=Link(bytes_per_second=300e9, latency_seconds=1e-5)))
    assert has_nvlink(cluster("a device of tomorrow"))


def test_groups_of_processes_take_no_device_memory() -> None:
    assert communicator_overhead(cluster("cpu", kind="cpu"), 4) == NOTHING


def test_what_cannot_be_a_communicator_or_a_figure() -> None:
    with pytest.raises(ValueError, match="a communicator of 1 ranks"):
        communicator_overhead(cluster("L4"), 1)
    with pytest.raises(ValueError, match="expected = 2, high = 1"):
        Overhead(expected=2, high=1, source="")
