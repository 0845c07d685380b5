import ctypes
import faulthandler
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.model import child_process, trace_model
from lightning_mist.model.child_process import BUDGET, Endless, RemoteTraceback, RunClock, can_fork, run_apart


def step_gradients(size: int) -> torch.Tensor:
    weight = torch.ones(size, size, requires_grad=True)
    (weight @ weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


class Awkward(Exception):
    """Cannot be unpickled: it keeps less than it takes."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fail(how: str, **kwargs: Any) -> Any:
    if how == "tell":
        kwargs["tell"]("half way")
        kwargs["tell"]("almost there")
        return os.getpid()
    if how == "plan":
        raise PlanError("microbatch_size = 3: no")
    if how == "awkward":
        raise Awkward("this", "that")
    if how == "abort":
        os.abort()
    if how == "segment":
        ctypes.string_at(0)
    if how in ("kill", "term"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
    if how == "exit":
        sys.exit(3)
    if how == "leave":
        os._exit(4)
    return lambda: None


def test_a_result_comes_back_from_a_copy() -> None:
    torch.set_num_threads(1)
    expected = step_gradients(64)
    assert can_fork()
    here = os.getpid()
    assert torch.equal(run_apart(step_gradients, 64), expected)
    assert run_apart(os.getppid) == here


def test_a_result_comes_back_from_a_new_process() -> None:
    assert run_apart(os.getpid, method="spawn") != os.getpid()


def test_texts_come_while_it_runs() -> None:
    texts: list[str] = []
    assert run_apart(fail, "tell", tell=texts.append) != os.getpid()
    assert texts == ["half way", "almost there"]


def test_errors_come_back_as_they_were() -> None:
    with pytest.raises(PlanError, match=r"^microbatch_size = 3: no$") as caught:
        run_apart(fail, "plan")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert 'raise PlanError("microbatch_size = 3: no")' in str(caught.value.__cause__)
    with pytest.raises(TraceError, match=r"^Awkward: this and that$"):
        run_apart(fail, "awkward")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "abort",
            r"fail was ended at .*test_child_process.py:\d+ by SIGABRT, as compiled code does that reads what fake",
        ),
        ("segment", r"fail was ended at .*test_child_process.py:\d+ by SIGSEGV"),
        ("term", "fail was ended by SIGTERM"),
        ("kill", "fail was ended by SIGKILL, which the system sends when memory runs out"),
        ("exit", "fail ended its process with status 3 and no result"),
        ("leave", "fail ended its process with status 4 and no result.*torch.library.register_fake"),
        ("unpicklable", "cannot be sent from one process to another"),
    ],
)
def test_an_end_without_a_result_is_an_error(how: str, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        run_apart(fail, how)


def deaf() -> str:
    """Fail where faulthandler is on and the signal is somebody else's."""
    faulthandler.enable()
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    with pytest.raises(TraceError) as caught:
        run_apart(fail, "abort")
    return str(caught.value)


def test_the_place_is_known_whoever_had_the_signal_before() -> None:
    assert "test_child_process.py" in run_apart(deaf)


def leave_a_group_as_garbage(path: Path) -> None:
    """A process group that only the garbage collector finds, as trainers leave theirs: its threads run until then."""
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
    cycle: list[Any] = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()
    # Into the oldest generation, which is seldom looked at: the copy shall have it still.
    gc.collect()


def collect() -> bool:
    gc.collect()
    return gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_copy_leaves_the_garbage_of_this_process_alone(tmp_path: Path, enabled: bool) -> None:
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        gc.disable()
        leave_a_group_as_garbage(tmp_path)
        if enabled:
            gc.enable()
        assert run_apart(collect, clock=RunClock(60.0)) is enabled
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.collect()
        (gc.enable if before else gc.disable)()


def spin(**kwargs: Any) -> None:
    """Compute for ever, and give no sign of it but one."""
    if kwargs:
        kwargs["tell"]("begun")
    while True:
        pass


def test_what_does_not_end_is_given_up() -> None:
    heard: list[str] = []
    with pytest.raises(TraceError, match=r"^a trial before training did not end at .*_process.py:\d+ within the time"):
        run_apart(spin, clock=RunClock(0.2), tell=heard.append)
    assert heard == ["begun"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda: threading.Event().wait(),
        lambda: queue.Queue[int]().get(),
        lambda: futures.Future[int]().result(),
        lambda: threading.Semaphore(0).acquire(),
    ],
)
def test_what_waits_for_another_thread_is_given_up_at_once(wait: Callable[[], Any]) -> None:
    with pytest.raises(TraceError, match=r"^a trial before training waits at .*_process.py:\d+ for another thread"):
        run_apart(wait, method="fork")


def polled() -> None:
    while True:
        time.sleep(0.02)


@pytest.mark.parametrize("wait", [lambda held: held.acquire(), lambda held: queue.SimpleQueue[int]().get(), polled])
def test_what_waits_in_vain_is_given_up_and_says_where(
    wait: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BUDGET, "idle_seconds", 0.5)
    held = threading.Lock()
    held.acquire()
    work = wait if wait is polled else partial(wait, held)
    with pytest.raises(TraceError, match=r"^a trial before training waits at .*_process.py:\d+ for \d+ s"):
        run_apart(work, method="fork")


def test_what_computes_is_not_given_up_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUDGET, "idle_seconds", 0.3)

    def compute() -> bool:
        started = time.process_time()
        while time.process_time() - started < 0.5:
            pass
        return True

    assert run_apart(compute, method="fork", clock=RunClock())


def test_what_it_has_started_ends_with_it() -> None:
    reading, writing = os.pipe()

    def work() -> None:
        if os.fork() == 0:
            signal.pause()
        spin()

    with pytest.raises(TraceError, match="given up"):
        run_apart(work, method="fork", clock=RunClock(0.3))
    os.close(writing)
    assert os.read(reading, 1) == b""  # nobody has the other end any more
    os.close(reading)


def test_what_it_builds_is_left_without_a_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"

    def build() -> None:
        lock.touch()
        try:
            subprocess.run(["sleep", "100"], check=False)
        finally:
            lock.unlink()

    with pytest.raises(TraceError, match="given up"):
        run_apart(build, method="fork", clock=RunClock(0.3))
    assert not lock.exists()


def test_runs_have_the_time_that_runs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(child_process, "monotonic", lambda: now)
    clock, least, most = RunClock(), BUDGET.least_seconds, BUDGET.most_seconds

    def allowed(*, has_values: bool, takes: float = 0.0) -> float:
        nonlocal now
        with clock.running(has_values=has_values):
            began = now
            while not clock.is_over:
                now += 1.0
            found, now = now - 1.0 - began, began + takes
        return found

    assert (allowed(has_values=False), allowed(has_values=True)) == (least, most)
    # Nothing is known of real runs by those without values; a step may be slow by nature.
    assert allowed(has_values=True, takes=most - 1.0) == most
    assert allowed(has_values=True) == BUDGET.multiple * (most - 1.0)
    assert allowed(has_values=False) == least
    assert not clock.is_over


def test_here_too_what_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUDGET, "most_seconds", 0.1)
    clock, left = RunClock(), []

    def stubborn() -> None:
        with clock.running(has_values=True):
            while True:
                try:
                    left.append(spin())
                except Exception:
                    left.append(None)

    with (
        pytest.raises(Endless, match=r"did not end at .*_process.py:\d+ within the time it has"),
        clock.ending(),
    ):
        stubborn()
    assert not left
    with clock.ending():
        assert threading.active_count() > 1


def test_where_no_copy_can_be_made_the_function_must_be_picklable() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not can_fork()
        with pytest.raises(TraceError, match="must be picklable: give a function of a module"):
            run_apart(lambda: None)
    finally:
        done.set()
        thread.join()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch).relu()
        return batch.mean()


def test_a_trace_comes_back_whole() -> None:
    module, batch = Net(), torch.ones(4, 4)
    here = trace_model(module, batch, optimizer=torch.optim.SGD)
    assert run_apart(trace_model, module, batch, optimizer=torch.optim.SGD) == here


def test_a_process_with_threads_for_backward_is_not_copied():
    started, ended, task = threading.Event(), threading.Event(), Path()

    def wait():
        nonlocal task
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        (task / "comm").write_text("pt_autograd_0")
        started.set()
        ended.wait()

    (thread := threading.Thread(target=wait)).start()
    try:
        started.wait()
        assert not can_fork(threads=True)
        assert run_apart(step_gradients, 2).tolist() == [[4.0, 4.0], [4.0, 4.0]]
    finally:
        ended.set()
        thread.join()
    while task.exists():  # Python's thread has ended, the kernel's may take a moment more
        os.sched_yield()
    assert can_fork(threads=True)


def test_tensors_without_values_leave_a_process_that_can_be_copied():
    """Some versions of torch let a first backward find devices afterwards that are not there, and make threads."""
    script = (
        "import torch; from lightning_mist.model.child_process import can_fork, run_apart\n"
        "from lightning_mist.without_values import fake_mode\n"
        "def backward(): torch.ones((), requires_grad=True).backward()\n"
        "with torch.inference_mode(), fake_mode(): torch.ones(2)\n"
        "backward(); assert can_fork(); run_apart(backward)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
