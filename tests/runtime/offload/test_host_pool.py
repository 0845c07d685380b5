import gc
import weakref

import pytest
import torch

from lightning_mist.devices import HostOps
from lightning_mist.errors import PlanError
from lightning_mist.runtime.meter import StorageMeter
from lightning_mist.runtime.offload.host_pool import ALIGNMENT_BYTES, HostPool, is_host


def test_views_have_the_forms_of_others_and_begin_at_aligned_places():
    like = [torch.ones(3, dtype=torch.float64), torch.ones(4, 5).t(), torch.ones(2, dtype=torch.bfloat16)]
    pool = HostPool(HostOps())
    found = pool.take(like)
    assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in like]
    start = found[0].data_ptr()
    assert [(t.data_ptr() - start) % ALIGNMENT_BYTES for t in found] == [0, 0, 0]
    assert pool.nbytes == 64 + 128 + 64
    for index, tensor in enumerate(found):
        tensor.fill_(index)
    assert [set(t.flatten().tolist()) for t in found] == [{0.0}, {1.0}, {2.0}]


def test_a_tensor_that_is_not_dense_gets_a_dense_place():
    (found,) = HostPool(HostOps()).take([torch.ones(3, 1).expand(3, 4)])
    assert found.is_contiguous()


def test_more_than_the_budget_is_refused():
    pool = HostPool(HostOps(), budget=200)
    pool.take([torch.ones(32)])
    with pytest.raises(PlanError, match=r"offloading needs 256 B of host memory or more, and 200 B may be used"):
        pool.take([torch.ones(32)])
    assert pool.nbytes == 128


def test_memory_is_that_of_the_host_and_lives_as_long_as_its_tensors():
    pool = HostPool(HostOps())
    (found,) = pool.take([torch.ones(8)])
    assert is_host(found.view(2, 4).untyped_storage())
    assert not is_host(torch.ones(8).untyped_storage())
    meter = StorageMeter()
    meter.observe([found])
    with meter:
        found.add_(1)
    assert meter.peak_bytes == 0
    alive = weakref.ref(found.untyped_storage())
    del found, meter
    gc.collect()
    assert alive() is None
