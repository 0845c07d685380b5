import pytest

from lightning_mist.hardware import MixedCluster
from lightning_mist.tuner.budget import USABLE_MEMORY, check_memory_limit, tensor_share, usable_bytes
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
