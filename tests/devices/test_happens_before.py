"""The checker finds each missing wait, whatever the threads happened to do."""

import pytest
import torch
from torch.cuda._sanitizer import EventHandler

from tests.devices.happens_before import HappensBefore
from tests.devices.late_host import LateHost
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("ended_streams")


def test_the_sanitizer_has_the_methods_that_are_used():
    for name in (
        "stream_creation",
        "memory_allocation",
        "kernel_launch",
        "event_creation",
        "event_record",
        "event_wait",
        "event_synchronization",
    ):
        assert callable(getattr(EventHandler, f"_handle_{name}"))


def through_two_rooms(seed, *, without=None, pieces=6):
    """Pieces of host memory are loaded into two rooms in turns, used there, and stored again."""
    observer = HappensBefore()
    ops = LateHost(seed=seed, observer=observer)
    load, store = ops.stream(), ops.stream()
    host = [torch.full((4,), float(piece)) for piece in range(pieces)]
    rooms, free = [torch.empty(4) for _ in range(2)], [None, None]
    for piece, home in enumerate(host):
        room = rooms[piece % 2]
        if free[piece % 2] is not None and without != "room":
            ops.wait(free[piece % 2], load)
        ops.launch(lambda room=room, home=home: room.copy_(home), load, reads=[home], writes=[room])
        if without != "loaded":
            ops.wait(ops.record(load))
        ops.launch(lambda room=room: room.mul_(2), reads=[room], writes=[room])
        if without != "used":
            ops.wait(ops.record(), store)
        ops.launch(lambda room=room, home=home: home.copy_(room), store, reads=[room], writes=[home])
        free[piece % 2] = ops.record(store)
    ops.synchronize()
    return observer.races, host


@pytest.mark.parametrize("seed", range(5))
def test_with_all_waits_results_are_the_same_to_the_bit(seed):
    races, host = through_two_rooms(seed)
    assert races == []
    assert all(torch.equal(home, torch.full((4,), 2.0 * piece)) for piece, home in enumerate(host))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("without", ["room", "loaded", "used"])
def test_each_missing_wait_is_found(seed, without):
    races, _ = through_two_rooms(seed, without=without)
    assert races
