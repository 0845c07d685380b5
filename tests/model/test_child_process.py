import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.model import trace_model
from lightning_mist.model.child_process import RemoteTraceback, can_fork, run_apart


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
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    if how == "leave":
        os._exit(4)
    if how == "hang":
        threading.Event().wait()
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
    before = gc.isenabled()
    try:
        gc.disable()
        leave_a_group_as_garbage(tmp_path)
        if enabled:
            gc.enable()
        assert run_apart(collect, limit_seconds=60) is enabled
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        (gc.enable if before else gc.disable)()


def test_what_does_not_end_is_given_up() -> None:
    started = time.monotonic()
    with pytest.raises(TraceError, match=r"fail has not ended within 0.2 s"):
        run_apart(fail, "hang", limit_seconds=0.2)
    assert time.monotonic() - started < 60


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
