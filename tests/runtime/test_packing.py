import pytest
import torch

from lightning_mist.runtime.packing import in_host_memory, packed, unpacked

CPU = torch.device("cpu")
KINDS = [
    ((3,), torch.uint8),
    ((), torch.float32),
    ((2, 3), torch.bfloat16),
    ((2, 0), torch.int64),
    ((5,), torch.bool),
    ((2,), torch.complex64),
    ((1, 2), torch.float64),
]


def values():
    return [(torch.randn(shape) * 3).to(dtype) for shape, dtype in KINDS if not dtype.is_complex]


@pytest.mark.parametrize("more", [0, 7])
def test_what_was_packed_comes_back(more):
    torch.manual_seed(0)
    tensors = [torch.randn(3, 2).t(), torch.randn(2, 2, requires_grad=True), torch.randn(2, dtype=torch.complex64)]
    tensors += values()
    nbytes = sum(item.numel() * item.element_size() for item in tensors)
    buffer = packed(tensors, CPU, nbytes + more if more else None)
    assert (buffer.dtype, len(buffer)) == (torch.uint8, nbytes + more)
    back = unpacked(buffer, [(tuple(item.shape), item.dtype) for item in tensors])
    buffer.zero_()  # they have memory of their own
    for item, copy in zip(tensors, back, strict=True):
        assert (copy.dtype, copy.is_contiguous(), copy.requires_grad) == (item.dtype, True, False)
        assert torch.equal(copy, item)


def test_nothing_is_nothing():
    assert len(packed([], CPU)) == 0
    assert unpacked(torch.empty(0, dtype=torch.uint8), []) == []


def test_what_is_in_host_memory_is_not_copied():
    assert in_host_memory([torch.ones(2), torch.ones(3)]) == {}


@pytest.mark.gpu
def test_what_is_on_a_device_comes_in_one_copy():
    device = torch.device("cuda")
    tensors = [item.to(device) for item in values()]
    with torch.cuda.stream(torch.cuda.Stream()):
        copies = in_host_memory([*tensors, torch.ones(2)])
    assert copies.keys() == set(map(id, tensors))
    for item in tensors:
        assert torch.equal(copies[id(item)], item.cpu())
