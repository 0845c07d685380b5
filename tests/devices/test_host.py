"""Streams of a CPU: order within, none between but by events, errors that arrive."""

import gc
import pickle
import threading

import pytest
import torch

from lightning_mist.devices import HostOps, MemoryUse, ops_of, read, used_generators
from lightning_mist.model.child_process import RunClock, run_apart
from tests.devices.late_host import LateHost
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("ended_streams")

CPU = torch.device("cpu")


def test_a_stream_runs_in_order_and_later():
    ops, seen, gate = LateHost(seed=1), [], threading.Event()
    stream = ops.stream()
    ops.launch(gate.wait, stream)
    for number in range(5):
        ops.launch(lambda number=number: seen.append(number), stream)
    assert seen == []
    gate.set()
    ops.synchronize()
    assert seen == [0, 1, 2, 3, 4]


def test_a_stream_that_nobody_has_ends():
    before = threading.active_count()
    ops = HostOps()
    known = set(threading.enumerate())
    ops.stream(), ops.stream()
    ops.synchronize()
    threads = set(threading.enumerate()) - known
    assert len(threads) == 2
    del ops
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert threading.active_count() == before


def test_without_a_stream_work_runs_here_and_now():
    ops, seen = HostOps(), []
    ops.launch(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]


def test_events_order_streams():
    ops, seen, gate = HostOps(), [], threading.Event()
    first, second = ops.stream(), ops.stream(high_priority=True)
    ops.launch(gate.wait, first)
    ops.launch(lambda: seen.append("first"), first)
    ops.wait(ops.record(first), second)
    ops.launch(lambda: seen.append("second"), second)
    gate.set()
    ops.synchronize(ops.record(second))
    assert seen == ["first", "second"]


def test_timed_events_tell_seconds():
    ops = HostOps()
    stream = ops.stream()
    start = ops.record(timed=True)
    end = ops.record(stream, timed=True)
    ops.synchronize(end)
    assert ops.seconds(start, start) == 0.0
    assert ops.seconds(start, end) >= 0.0


@pytest.mark.parametrize("how", ["synchronize", "wait"])
def test_what_work_raises_reaches_who_waits(how):
    ops = HostOps()
    stream = ops.stream()

    def fail():
        raise KeyError("broken")

    ops.launch(fail, stream)
    event = ops.record(stream)
    with pytest.raises(KeyError, match="broken"):
        getattr(ops, how)(event)
    ops.synchronize()  # once


def test_a_copy_of_the_process_does_not_wait_for_streams_that_it_has_not():
    ops = HostOps()
    stream = ops.stream()
    assert run_apart(ops.synchronize, method="fork", clock=RunClock(20.0)) is None
    assert stream.works


def test_waits_of_the_host_are_counted():
    ops = HostOps()
    ops.wait(ops.record())
    assert ops.synchronizations == 0
    ops.synchronize()
    ops.synchronize(ops.record())
    assert ops.synchronizations == 2


def test_reading_numbers_counts_as_waiting():
    before = ops_of(CPU).synchronizations
    assert read(torch.tensor([1.0, 2.0])) == [1.0, 2.0]
    assert read(torch.tensor(3)) == 3
    assert ops_of(CPU).synchronizations == before + 2


def test_a_cpu_has_no_allocator_and_no_generator_of_its_own():
    ops = ops_of(CPU)
    assert ops is ops_of(torch.device("cpu"))
    ops.reset_peak()
    ops.release_cached()
    assert ops.memory() is None
    assert ops.generator() is None
    assert len(ops.host_memory(7)) == 7
    # Trainers can be pickled after a fit, with what has measured it.
    assert pickle.loads(pickle.dumps(ops)) is ops


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device that others may have begun to use")
def test_without_a_device_no_generators_are_in_use():
    assert used_generators() == []


@pytest.mark.gpu
def test_a_device_runs_streams_and_counts_memory():
    device = torch.device("cuda", 0)
    ops = ops_of(device)
    assert ops is ops_of(torch.device("cuda"))
    stream, values = ops.stream(high_priority=True), torch.ones(1 << 20, device=device)
    home = ops.host_memory(values.numel() * 4)
    assert home.is_pinned()
    start = ops.record(timed=True)
    ops.wait(start, stream)
    ops.launch(lambda: home.view(torch.float32).copy_(values, non_blocking=True), stream)
    end = ops.record(stream, timed=True)
    before = ops.synchronizations
    ops.synchronize(end)
    assert ops.synchronizations == before + 1
    assert bool((home.view(torch.float32) == 1).all())
    assert ops.seconds(start, end) > 0
    ops.reset_peak()
    use = ops.memory()
    assert isinstance(use, MemoryUse)
    assert use.allocated <= use.peak_allocated <= use.reserved <= use.used <= use.total
    generator = ops.generator()
    state = generator.get_state()
    first = torch.rand(3, device=device)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device=device), first)
    assert generator in used_generators()
    assert pickle.loads(pickle.dumps(ops)) is ops
