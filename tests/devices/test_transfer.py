import pytest
import torch

from lightning_mist.devices import Homeward, HostOps, ops_of, packed, to_device, unpacked
from tests.devices.happens_before import HappensBefore
from tests.devices.late_host import LateHost
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("ended_streams")

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


def test_values_come_home_behind_what_made_them_in_one_copy():
    observer = HappensBefore()
    ops = LateHost(seed=3, observer=observer)
    homeward, tensors = Homeward(ops), values()
    for item in tensors:
        ops.launch(lambda item=item: item.zero_(), writes=[item])
    homeward.made()
    copies = homeward.bring(
        [*tensors, tensors[0], torch.ones(2, device="meta"), torch.ones(2, dtype=torch.cfloat).conj()]
    )
    assert copies.keys() == set(map(id, tensors))
    assert all(torch.equal(copies[id(item)], item) for item in tensors)
    assert ops.synchronizations == 1
    # Who writes afterwards has nothing to wait for: what was brought home has been read.
    ops.launch(tensors[1].zero_, writes=[tensors[1]])
    assert observer.races == []


def test_what_was_made_later_is_not_read_in_order():
    """The wait in :meth:`Homeward.bring` is for what had been made when :meth:`Homeward.made` was called."""
    observer = HappensBefore()
    ops = LateHost(seed=3, observer=observer)
    homeward, tensor = Homeward(ops), torch.ones(2)
    homeward.made()
    ops.launch(tensor.zero_, writes=[tensor])
    homeward.bring([tensor])
    assert observer.races


def test_nothing_is_brought_without_waiting():
    ops = HostOps()
    homeward = Homeward(ops)
    assert homeward.bring([]) == {}
    assert ops.synchronizations == 0


def test_a_small_tensor_on_its_device_is_itself():
    tensor = torch.ones(2)
    assert to_device(tensor, CPU) is tensor


@pytest.mark.gpu
def test_what_is_on_a_device_comes_in_one_copy():
    device = torch.device("cuda", 0)
    ops, tensors = ops_of(device), [item.to(device) for item in values()]
    homeward, before = Homeward(ops), ops.synchronizations
    copies = homeward.bring([*tensors, torch.ones(2)])
    assert ops.synchronizations == before + 1
    assert copies.keys() == set(map(id, tensors))
    for item in tensors:
        assert torch.equal(copies[id(item)], item.cpu())
        assert torch.equal(to_device(copies[id(item)], device), item)
