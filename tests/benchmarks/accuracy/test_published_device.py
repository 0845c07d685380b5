import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.accuracy.published_device import OutOfDeviceMemoryError, SimulatedDevice
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings

MIB = 1 << 20


def test_tensors_take_memory_while_they_live():
    with SimulatedDevice() as device:
        first = torch.empty(MIB, device="meta")
        second = first.view(2, -1)[0] + 1
        assert device.allocator.allocated == 6 * MIB
        del first
        assert device.allocator.allocated == 2 * MIB
        second.add_(1)
        assert device.peak_allocated == 6 * MIB
        device.reset_peaks()
        assert device.peak_allocated == 2 * MIB
    del second
    assert device.allocator.allocated == 0


def test_a_training_step_keeps_what_autograd_keeps():
    with SimulatedDevice() as device:
        layer = nn.Linear(1024, 1024, bias=False, device="meta")
        x = torch.empty(512, 1024, device="meta")
        out = F.relu(layer(x))
        assert device.allocator.allocated == 4 * MIB + 2 * MIB + 2 * MIB  # relu keeps its result, which is the output
        out.sum().backward()
        del out, x
        assert device.allocator.allocated == 2 * 4 * MIB


def test_memory_of_a_storage_can_be_given_back_and_taken_again():
    with SimulatedDevice() as device:
        tensor = torch.empty(MIB, device="meta")
        device.drop(tensor)
        assert not device.has_memory(tensor)
        assert device.allocator.allocated == 0
        with device.on("other"):
            device.hold(tensor)
        assert device.allocator.allocated == 4 * MIB
        with pytest.raises(ValueError, match="has memory already"):
            device.hold(tensor)


def test_what_is_paused_takes_no_memory():
    with SimulatedDevice() as device:
        with device.paused():
            elsewhere = torch.empty(MIB, device="meta")
        elsewhere.add_(1)
        assert device.allocator.allocated == 0


def test_memory_of_one_stream_does_not_serve_another():
    with SimulatedDevice() as device:
        tensor = torch.empty(16 * MIB, device="meta")
        del tensor
        with device.on("other"):
            kept = torch.empty(16 * MIB, device="meta")
        assert device.allocator.reserved == 2 * kept.nbytes
        device.empty_cache()
        assert device.allocator.reserved == 64 * MIB


def test_a_workspace_is_taken_with_the_first_product():
    with SimulatedDevice(workspaces=8 * MIB) as device:
        x = torch.empty(16, 16, device="meta")
        assert device.allocator.allocated < MIB
        for _ in range(2):
            x @ x
        assert 8 * MIB < device.allocator.allocated < 9 * MIB


def test_a_device_may_be_too_small():
    settings = AllocatorSettings(capacity_bytes=64 * MIB)
    with SimulatedDevice(settings) as device, pytest.raises(OutOfDeviceMemoryError, match="on stream compute"):
        torch.empty(32 * MIB, device="meta")
    assert device.allocator.allocated == 0
