"""Memory that several streams use: traces worked by hand."""

import pytest

from benchmarks.accuracy.allocator_streams import StreamAllocator, StreamEvent, simulated
from lightning_mist.estimate.allocator.allocator_data import MIB, AllocatorSettings


def malloc(identity: int, nbytes: int) -> StreamEvent:
    return StreamEvent("malloc", identity, nbytes, "compute")


def used_by(stream: str) -> list[StreamEvent]:
    return [malloc(0, 30 * MIB), StreamEvent("use", 0, stream=stream), StreamEvent("free", 0)]


def finish(stream: str) -> StreamEvent:
    return StreamEvent("finish", stream=stream)


def test_memory_that_another_stream_uses_waits_for_it() -> None:
    used, none = used_by("gather"), AllocatorSettings()
    found = simulated([*used, malloc(1, 30 * MIB)], none)
    assert (found["allocated"], found["active"], found["reserved"]) == (30 * MIB, 60 * MIB, 60 * MIB)
    assert simulated([*used, finish("other"), malloc(1, 30 * MIB)], none)["reserved"] == 60 * MIB
    found = simulated([*used, finish("gather"), malloc(1, 30 * MIB)], none)
    assert found["active"] == found["reserved"] == 30 * MIB
    # Its own stream is no other one.
    assert simulated([*used_by("compute"), malloc(1, 30 * MIB)], none)["reserved"] == 30 * MIB


def test_at_capacity_waiting_memory_is_waited_for() -> None:
    limited = AllocatorSettings(capacity_bytes=64 * MIB)
    assert simulated([*used_by("gather"), malloc(1, 40 * MIB)], limited)["reserved"] == 40 * MIB


def test_what_is_not_there_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="allocation 2"):
        StreamAllocator(AllocatorSettings()).use(2, "gather")
