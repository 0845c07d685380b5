"""Copies of streams beside what computes, and beside an allocator that gives freed memory out again."""

import pytest
import torch

from lightning_mist.devices import ops_of
from lightning_mist.runtime.host_memory import CopyStreams, HostPool
from tests.devices.kinds import DEVICES
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("ended_streams")

ELEMENTS = 1 << 22


def make(device):
    """CopyStreams, and two places in host memory."""
    streams = CopyStreams(ops_of(device))
    return streams, *HostPool(streams.ops).take([torch.empty(ELEMENTS, device=device)] * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_waited_for_may_be_freed(device):
    streams, home, _ = make(device)
    for number in range(4):
        there = torch.full((ELEMENTS,), float(number), device=device)
        streams.wait(streams.store([home], [there]))
        del there
        torch.full((ELEMENTS,), -1.0, device=device)
        streams.settle()
        assert bool((home == number).all())


@pytest.mark.parametrize("device", DEVICES)
def test_what_arrives_is_there_for_who_waits(device):
    streams, home, other = make(device)
    for number in range(4):
        home.fill_(number)
        torch.full((ELEMENTS,), -1.0, device=device).mul_(2.0)
        there = torch.empty(ELEMENTS, device=device)
        # It was the product's until that has been computed.
        streams.wait(streams.load([there], [home], after=[streams.ops.record()]))
        there += 1
        streams.store([other], [there])
        streams.settle()
        assert bool((other == number + 1).all())
    assert streams.loaded_bytes == streams.stored_bytes == 4 * 4 * ELEMENTS


@pytest.mark.parametrize("device", DEVICES)
def test_directions_are_ordered_by_events_alone(device):
    streams, home, other = make(device)
    there, back = torch.arange(ELEMENTS, device=device).float(), torch.empty(ELEMENTS, device=device)
    for _ in range(4):
        there += 1
        out = streams.store([home, other], [there, there])
        streams.wait(streams.load([back], [other], after=[out, streams.ops.record()]))
        streams.wait(out)
        assert torch.equal(back, there)
