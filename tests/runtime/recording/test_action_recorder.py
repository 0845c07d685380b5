import gc
import weakref

import pytest
import torch

from lightning_mist.devices import host
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.runtime.recording.action_recorder import Recorded, Recorder
from lightning_mist.schedule import Action
from tests.integration.parity import make_plan
from tests.runtime.test_executor import World

CPU = torch.device("cpu")


class Pending:
    """Work whose waiting takes some seconds of the fake clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def is_completed(self):
        return True

    def wait(self):
        self.clock.now += self.seconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def run(self, *steps):
        """Compute for the first number of seconds, wait for the second, and so on."""
        for index, seconds in enumerate(steps):
            if index % 2:
                yield Pending(self, seconds)
            else:
                self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(host, "perf_counter", clock)
    return clock


def test_waiting_is_part_of_an_action_and_told_apart(clock):
    recorder, forward = Recorder(CPU), Action.parse("0F1")
    recorder.is_on = True
    complete(recorder.around(forward, clock.run(1.0, 0.5, 2.0, 0.25, 4.0)))
    complete(recorder.around("sends", clock.run(0.0, 8.0)))
    clock.now += 16.0
    with recorder.phase("update"):
        clock.now += 32.0
    with recorder.phase("results", waits=True):
        clock.now += 64.0
    assert recorder.take() == (
        Recorded(action=forward, seconds=7.75, waited_seconds=0.75),
        Recorded(action="sends", seconds=8.0, waited_seconds=8.0),
        Recorded(action="update", seconds=32.0),
        Recorded(action="results", seconds=64.0, waited_seconds=64.0),
    )
    assert recorder.take() == ()


def test_off_it_runs_the_action_and_records_nothing(clock):
    recorder = Recorder(CPU)
    complete(recorder.around("action", clock.run(1.0, 0.5)))
    with recorder.phase("update"):
        clock.now += 1.0
    assert clock.now == 102.5
    assert recorder.take() == ()


def test_an_error_goes_through(clock):
    recorder = Recorder(CPU)
    recorder.is_on = True

    def run():
        yield Pending(clock, 1.0)
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        complete(recorder.around("action", run()))
    assert recorder.take() == ()


def test_a_work_that_was_waited_for_is_let_go():
    """Its tensor would otherwise stay until the next work comes."""
    recorder, alive = Recorder(CPU), []
    recorder.is_on = True

    def run():
        work = Pending(Clock(), 0.0)
        alive.append(weakref.ref(work))
        yield work
        del work
        gc.collect()
        alive.append(alive[0]())
        yield Pending(Clock(), 0.0)

    complete(recorder.around("action", run()))
    assert alive[1] is None


@pytest.mark.parametrize("plan", [make_plan([2, 2], parts=2), make_plan([4], degrees=[2], zero=3)])
def test_every_action_of_a_batch_is_recorded_and_nothing_changes(plan):
    quiet, measured = World(plan), World(plan)
    measured.batches, measured.parts = quiet.batches, quiet.parts
    for rank in measured.ranks:
        rank.executor.recorder.is_on = True
    quiet.run()
    measured.run()
    for plain, rank in zip(quiet.ranks, measured.ranks, strict=True):
        found = rank.executor.recorder.take()
        assert [item.action for item in found] == [*rank.executor.actions, "sends"]
        assert all(0 <= item.waited_seconds <= item.seconds for item in found)
        assert any(item.seconds > 0 for item in found)
        assert plain.executor.recorder.take() == ()
        for name, gradient in plain.gradients().items():
            other = rank.gradients()[name]
            assert (gradient is None) == (other is None)
            assert gradient is None or torch.equal(gradient, other)


@pytest.mark.gpu
def test_on_a_device_events_tell_when_it_came_there():
    device = torch.device("cuda")
    recorder, values = Recorder(device), torch.ones(4096, 4096, device=device)
    recorder.is_on = True
    with recorder.phase("products"):
        for _ in range(20):
            values = values @ values
    with recorder.phase("nothing"):
        pass
    torch.cuda.synchronize(device)
    products, nothing = recorder.take()
    assert products.seconds > nothing.seconds >= 0
