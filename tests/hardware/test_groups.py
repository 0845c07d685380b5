import pytest

from lightning_mist.hardware import Cluster, Device, measuring_groups
from lightning_mist.hardware.groups import group_ranks, group_shapes


def cluster(nodes: int, devices: int) -> Cluster:
    return Cluster(num_nodes=nodes, devices_per_node=devices, device=Device(name="cpu", memory_bytes=1, kind="cpu"))


@pytest.mark.parametrize(
    ("nodes", "devices", "shapes"),
    [
        (1, 1, ()),
        (1, 2, ((1, 2),)),
        (1, 6, ((1, 2), (1, 4), (1, 6))),
        (2, 1, ((2, 1),)),
        (3, 2, ((1, 2), (2, 1), (2, 2), (3, 1), (3, 2))),
    ],
)
def test_shapes(nodes: int, devices: int, shapes: tuple[tuple[int, int], ...]) -> None:
    assert group_shapes(cluster(nodes, devices)) == shapes


def test_groups_of_a_shape_are_disjoint_and_compete() -> None:
    assert group_ranks(cluster(1, 4), 1, 2) == ((0, 1), (2, 3))
    assert group_ranks(cluster(2, 2), 2, 1) == ((0, 2), (1, 3))
    assert group_ranks(cluster(1, 3), 1, 2) == ((0, 1),)
    assert group_ranks(cluster(3, 2), 2, 2) == ((0, 1, 2, 3),)
    assert group_ranks(cluster(2, 8), 2, 8) == (tuple(range(16)),)


def test_one_device_needs_no_process_group() -> None:
    with measuring_groups(cluster(1, 1)) as groups:
        assert groups == ()
