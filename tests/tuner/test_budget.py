import pytest

from lightning_mist.tuner.budget import USABLE_MEMORY, tensor_share, usable_bytes
from tests.specs import cluster


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_a_limit_a_share_of_the_memory_is_left(kind):
    assert usable_bytes(cluster(2, memory=1000, kind=kind), None) == USABLE_MEMORY * 1000


def test_a_limit_is_about_all_that_a_device_has_in_use():
    assert usable_bytes(cluster(2, kind="cpu"), 500) == 500
    assert usable_bytes(cluster(2, kind="cuda"), 500) == USABLE_MEMORY * 500
    assert tensor_share(cluster(2, kind="cuda")) == USABLE_MEMORY
