"""Copies of lanes beside what computes, and beside an allocator that gives freed memory out again."""

import pytest
import torch

from lightning_mist.devices import ops_of
from lightning_mist.runtime.host_memory.copy_streams import Lanes
from lightning_mist.runtime.host_memory.host_pool import HostPool
from tests.devices.kinds import DEVICES
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("ended_streams")

ELEMENTS = 1 << 22


def make(device):
    """Lanes, and two places in host memory."""
    lanes = Lanes(ops_of(device))
    return lanes, *HostPool(lanes.ops).take([torch.empty(ELEMENTS, device=device)] * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_waited_for_may_be_freed(device):
    lanes, home, _ = make(device)
    for number in range(4):
        there = torch.full((ELEMENTS,), float(number), device=device)
        lanes.wait(lanes.store([home], [there]))
        del there
        torch.full((ELEMENTS,), -1.0, device=device)
        lanes.settle()
        assert bool((home == number).all())


@pytest.mark.parametrize("device", DEVICES)
def test_what_arrives_is_there_for_who_waits(device):
    lanes, home, other = make(device)
    for number in range(4):
        home.fill_(number)
        torch.full((ELEMENTS,), -1.0, device=device).mul_(2.0)
        there = torch.empty(ELEMENTS, device=device)
        # It was the product's until that has been computed.
        lanes.wait(lanes.load([there], [home], after=[lanes.ops.record()]))
        there += 1
        lanes.store([other], [there])
        lanes.settle()
        assert bool((other == number + 1).all())
    assert lanes.loaded_bytes == lanes.stored_bytes == 4 * 4 * ELEMENTS


@pytest.mark.parametrize("device", DEVICES)
def test_directions_are_ordered_by_events_alone(device):
    lanes, home, other = make(device)
    there, back = torch.arange(ELEMENTS, device=device).float(), torch.empty(ELEMENTS, device=device)
    for _ in range(4):
        there += 1
        out = lanes.store([home, other], [there, there])
        lanes.wait(lanes.load([back], [other], after=[out, lanes.ops.record()]))
        lanes.wait(out)
        assert torch.equal(back, there)
