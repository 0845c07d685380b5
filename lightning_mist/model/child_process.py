"""Running a function in a process of its own, whose end is not ours.

A trace runs the user's code, and whatever that calls, on tensors that some extensions do not expect: a kernel that
reads a fake tensor's memory ends the process, and no ``except`` helps. So traces that nobody needs to share a process
with run in a child, and what ends the child becomes an error here, with the place where it was.
"""

import builtins
import ctypes
import faulthandler
import fcntl
import gc
import io
import mmap
import multiprocessing
import os
import pathlib
import pickle
import re
import signal
import stat
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

from lightning_mist.errors import TraceError

T = TypeVar("T")

Tell = Callable[..., None]

_WAYS_OUT = (
    "give the operator that ends it a fake kernel (torch.library.register_fake), or leave it out of training_step"
)

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)

_NOT_THE_USERS = ("/torch/", f"{Path(__file__).parents[1]}/", "/multiprocessing/", "<frozen", "/ctypes/")
_LIBRARIES = (*_NOT_THE_USERS, "/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/")


@dataclass(slots=True, kw_only=True)
class TrialBudget:
    """What is spent on a trial of the user's code before it is given up.

    Attributes:
        idle_seconds: How long a child may compute for less than half of the time: a copy of this process then waits
            for what copies do not have. What is kept from computing by others counts as computing.
        least_seconds: How long a run of the step without values may take, which computes nothing, and at least any.
        most_seconds: How long a run on real numbers may take before one has ended, which training would wait for too:
            steps that take minutes are nothing unusual. So may all that is no run of the step.
        multiple: How many times as long as the longest on real numbers that has ended a later one may take.
        rounds: Reads of values at one line in one block, operators between, that are a loop, once there were
            ``operators``: more than a layer has experts, less than a text has words.
        most_rounds: The same after however few operators.
        most_reads: Reads of values at one line that are a loop: ``tolist`` of a batch stays below.
        operators: Of a run without values behind which a line that reads values may be a loop.
        most_operators: Of a run without values that reads none: no network of our tests has a tenth of them.
    """

    idle_seconds: float = 15.0
    least_seconds: float = 60.0
    most_seconds: float = 300.0
    multiple: float = 10.0
    rounds: int = 200
    most_rounds: int = 500
    most_reads: int = 100_000
    operators: int = 5_000
    most_operators: int = 200_000


BUDGET = TrialBudget()

_POLL_SECONDS = 0.25
_CLEANING_SECONDS = 1.0
_TERMINATED = 128 + signal.SIGTERM
_HELD_UP = 8  # times as long as it should be is a wait in which the process did not run


class Endless(BaseException):
    """Ends a trial that would not end by itself; passes the user's ``except Exception``."""


class RunClock:
    """Until when a trial must give its next sign of life: a run of user code begins or ends.

    A copy of this process writes what this one reads. Where there is no copy the run is ended by an exception.

    Args:
        most_seconds: In place of the budget's.
    """

    def __init__(self, most_seconds: float | None = None) -> None:
        self._shared = memoryview(mmap.mmap(-1, 16)).cast("d")  # the time, and seconds of the longest run
        self._most, self._inside = most_seconds, set[int]()

    @property
    def end(self) -> float:
        """The time, on the clock of :func:`time.monotonic`."""
        return float(self._shared[0])

    @property
    def is_over(self) -> bool:
        """Whether the time has come."""
        return monotonic() > self.end

    def prolong(self, seconds: float) -> None:
        """Give time back in which nothing could run."""
        self._shared[0] += seconds

    def begin(self) -> None:
        """Something begins of which nothing is known."""
        self._shared[0] = monotonic() + (self._most or BUDGET.most_seconds)

    @contextmanager
    def running(self, *, has_values: bool) -> Iterator[None]:
        """Around a run of the step."""
        thread, began, longest = threading.get_ident(), monotonic(), self._shared[1]
        self.begin()
        if longest or not has_values:
            self._shared[0] = began + max(BUDGET.least_seconds, BUDGET.multiple * longest * has_values)
        self._inside.add(thread)
        try:
            yield
        finally:
            self._inside.discard(thread)
            if has_values:
                self._shared[1] = max(longest, monotonic() - began)
            self.begin()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Inside, what this process runs is ended when the time has come; raises :class:`Endless` then."""
        owner, stopped, end = threading.get_ident(), threading.Event(), ctypes.pythonapi.PyThreadState_SetAsyncExc

        def watch() -> None:
            before = monotonic()
            while not stopped.wait(_POLL_SECONDS):
                now = monotonic()
                self.prolong(now - before if now - before > _HELD_UP * _POLL_SECONDS else 0.0)
                before = now
                for thread in (tuple(self._inside) or (owner,)) if self.is_over else ():
                    end(ctypes.c_ulong(thread), ctypes.py_object(Endless))

        self.begin()
        watcher = threading.Thread(target=watch, name="lightning-mist-trials", daemon=True)
        watcher.start()
        try:
            yield
        except Endless as error:
            frames = [f"{each.filename}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
            raise Endless(str(error) or _overdue(frames[::-1])) from None
        finally:
            stopped.set()
            watcher.join()
            end(ctypes.c_ulong(owner), None)  # what has not arrived does not any more


def _overdue(frames: Sequence[str]) -> str:
    return f"a trial before training did not end{_users(frames)} within the time it has, and was given up"


def _waiting(frames: Sequence[str], how: str) -> str:
    return (
        f"a trial before training waits{_users(frames)}{how} and was given up: it runs in a process of its own, which "
        "has no threads of this one, and which other processes do not answer"
    )


def _users(frames: Sequence[str]) -> str:
    """Where the innermost frame of the user's is, in words; frames begin with the innermost."""
    sites = [f"{path}/" for path in sys.path if path and any(Path(path).glob("*.dist-info"))]
    for others in ((*_LIBRARIES, *sites), _NOT_THE_USERS):
        for frame in frames:
            if not any(part in frame for part in others):
                return f" at {frame}"
    return ""


class RemoteTraceback(Exception):  # noqa: N818 - it is where an error comes from, not what went wrong
    """The traceback of an error in the child, as text; the cause of the error here."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def can_fork(*, threads: bool = False) -> bool:
    """Whether a copy of this process can compute: nothing is in use that no fork survives, and no other thread.

    What does not survive are devices, and threads that backward has for them, as soon as torch has found some, also
    those that stand in for devices that are not there: in a copy every backward is refused then.

    Args:
        threads: Whether there may be other threads, of which nothing is needed in the copy.
    """
    from lightning_mist.devices import used_generators

    is_alone = threads or threading.active_count() == 1
    return sys.platform == "linux" and is_alone and not used_generators() and not _has_backward_threads()


def _has_backward_threads() -> bool:
    with suppress(FileNotFoundError):  # a thread that has just ended
        return any((task / "comm").read_text().startswith("pt_autograd") for task in Path("/proc/self/task").iterdir())
    return _has_backward_threads()


def run_apart(
    function: Callable[..., T],
    /,
    *args: Any,
    tell: Tell | None = None,
    clock: RunClock | None = None,
    method: Literal["fork", "spawn"] | None = None,
    muted: bool = False,
    **kwargs: Any,
) -> T:
    """Call a function in another process and return what it returns.

    Args:
        function: Anything where this process can be copied; otherwise a function of a module, with arguments that can
            be pickled. Its result must be picklable.
        tell: Called here with all that the function says, which then gets a keyword argument ``tell`` to say it.
        clock: Says when the child is ended that has not told anything.
        method: How the process is made; by default a copy of this one where that is safe, else a new one.
        muted: Whether nothing that the other process writes is to arrive anywhere.

    Raises:
        TraceError: If the child ends without a result, does not end in time or waits in vain, or its result cannot be
            sent.
        Exception: What the function raised, with the child's traceback as its cause; a :class:`TraceError` with its
            text if it cannot be sent.
    """
    context = multiprocessing.get_context(method or ("fork" if can_fork() else "spawn"))
    ours, theirs = context.Pipe(duplex=False)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    (clock := clock or RunClock()).begin()
    with tempfile.TemporaryDirectory() as directory:
        last_words = Path(directory, "traceback")
        process: Any = context.Process(  # type: ignore[attr-defined]
            target=_child,
            args=(theirs, last_words, function, args, kwargs, tell is not None, gc.isenabled(), muted),
            name=name,
        )
        try:
            _start(process, name)
            # From here on the pipe ends with the child.
            theirs.close()
            kind, content = _answer(
                ours, process, tell, clock, last_words, is_copy=context.get_start_method() == "fork"
            )
        except BaseException:
            if process.pid is not None:
                process.terminate()  # a build that it is in has a lock file, for which training would wait
                process.join(_CLEANING_SECONDS)
            raise
        finally:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                process.kill()
                process.join()
                process.close()
            ours.close()
            theirs.close()
    if kind == "result":
        result: T = content
        return result
    error, text = content
    raise error from RemoteTraceback(text)


def _start(process: Any, name: str) -> None:
    is_collecting = gc.isenabled()
    # A copy must not collect before it has set aside what is garbage here; see _child.
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of the threads that torch keeps for parallel loops: the child uses none.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TraceError(
            f"{name} cannot be run in a new process: {error}. This process cannot be copied (other threads run in it, "
            "or a device is in use), so the function and its arguments must be picklable: give a function of a module"
        ) from error
    finally:
        if is_collecting:
            gc.enable()


def _child(
    pipe: Connection,
    last_words: Path,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    tells: bool,
    collects: bool,
    muted: bool,
) -> None:
    # Garbage that came along is not ours to destroy: process groups then wait for their threads, which are not here, so
    # that this process ends or waits for ever.
    gc.freeze()
    if collects:
        gc.enable()
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)  # it would wake the parent
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    if sys.platform == "linux":
        # A group of its own is not ended with that of its parent; 1 is the signal that tells of the parent's end.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with last_words.open("w") as file:
        # Where it is on already it takes another file, but not the signals back that somebody took from it.
        faulthandler.disable()
        faulthandler.enable(file, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        _refuse_lone_waits()
        if muted:
            mute(keep=(pipe.fileno(), file.fileno()))
        _work(pipe, function, args, kwargs, tells)


def _refuse_lone_waits() -> None:
    """Let nothing wait for another thread where there is none: queues, events, and results of pools do."""
    waits: Any = threading.Condition
    original = waits.wait

    def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is None and threading.active_count() == 1:
            frames = [f"{each.filename}:{each.lineno}" for each in traceback.extract_stack()[::-1]]
            raise Endless(_waiting(frames, " for another thread"))
        return bool(original(condition, timeout))

    waits.wait = wait


def _work(pipe: Connection, function: Callable[..., Any], args: Any, kwargs: Any, tells: bool) -> None:
    import torch

    # The threads of parallel loops did not come along.
    torch.set_num_threads(1)
    if tells:
        kwargs = {**kwargs, "tell": lambda *said: pipe.send(("told", said))}
    try:
        result = function(*args, **kwargs)
    except (Exception, Endless) as error:
        _send_error(pipe, error if isinstance(error, Exception) else TraceError(str(error)))
        return
    try:
        content = pickle.dumps(("result", result))
    except Exception as error:
        _send_error(pipe, TraceError(f"what {function} returned cannot be sent from one process to another: {error}"))
        return
    pipe.send_bytes(content)


def _send_error(pipe: Connection, error: Exception) -> None:
    text = "".join(traceback.format_exception(error))
    try:
        content = pickle.dumps(("error", (error, text)))
        pickle.loads(content)
    except Exception:
        # Errors of the user's own classes may need more arguments than they keep.
        content = pickle.dumps(("error", (TraceError(f"{type(error).__name__}: {error}"), text)))
    pipe.send_bytes(content)


def _answer(
    pipe: Connection, process: Any, tell: Tell | None, clock: RunClock, last_words: Path, *, is_copy: bool
) -> tuple[str, Any]:
    idle, computed, end = monotonic(), 0.0, 0.0
    while True:
        before = monotonic()
        ready = wait([pipe, process.sentinel], _POLL_SECONDS)
        if not ready:
            now, computes = monotonic(), _computed(process.pid)
            if now - before > _HELD_UP * _POLL_SECONDS:  # this process was stopped, and so was the child perhaps
                clock.prolong(now - before)
                idle, computed = now, computes or 0.0
            if computes is None or clock.end != end or abs(computes - computed) > 0.5 * (now - idle):
                idle, computed, end = now, computes or 0.0, clock.end
            if clock.is_over:
                raise TraceError(_overdue(_frames(process, last_words)))
            # A new process has all that there is to wait for.
            if is_copy and now - idle > BUDGET.idle_seconds:
                raise TraceError(_waiting(_frames(process, last_words), f" for {now - idle:.0f} s"))
        elif pipe in ready:
            try:
                kind, content = _read(pipe)
            except EOFError:
                # Closed without a word: the child is gone or about to be.
                raise _end_of(process, last_words) from None
            if kind != "told":
                return kind, content
            clock.begin()
            if tell is not None:
                tell(*content)
        else:
            raise _end_of(process, last_words)


def _computed(pid: int) -> float | None:
    """Seconds that a process and those that it started have computed, or could have; ``None`` if that is not known."""
    try:
        found = [Path(f"/proc/{pid}/task/{task}") for task in os.listdir(f"/proc/{pid}/task")]
        if any((task / "stat").read_text().rpartition(")")[2].split()[0] == "D" for task in found):
            return None  # it reads a disk
        times = [sum(map(int, (task / "schedstat").read_text().split()[:2])) / 1e9 for task in found]
        children = [int(child) for task in found for child in (task / "children").read_text().split()]
    except OSError:
        return None
    return sum(times) + sum(_computed(child) or 0.0 for child in children)


def _frames(process: Any, last_words: Path) -> list[str]:
    """The frames in which a child is, the innermost first."""
    text, until = "", monotonic() + 1.0
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    while monotonic() < until and (not text or text != last_words.read_text()):
        sleep(0.02)
        text = last_words.read_text() if last_words.exists() else ""
    return [f"{found['file']}:{found['line']}" for found in _FRAME.finditer(text)]


def _read(pipe: Connection) -> tuple[str, Any]:
    content = pipe.recv_bytes()
    with warnings.catch_warnings():
        # torch 2.13 restores the forms of containers in a way that it deprecates itself.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        found: tuple[str, Any] = pickle.loads(content)
        return found


def _end_of(process: Any, last_words: Path) -> TraceError:
    process.join()
    text = last_words.read_text() if last_words.exists() else ""
    frames = [f"{found['file']}:{found['line']}" for found in _FRAME.finditer(text)]
    error = TraceError(_how_it_ended(process.name, process.exitcode, _users(frames)))
    if text:
        error.__cause__ = RemoteTraceback(text)
    return error


def _how_it_ended(name: str, status: int, place: str) -> str:
    if status == _TERMINATED:
        status = -signal.SIGTERM
    if status >= 0:
        return f"{name} ended its process with status {status} and no result, as sys.exit does: {_WAYS_OUT}"
    number = -status
    try:
        what = signal.Signals(number).name
    except ValueError:
        what = f"signal {number}"
    meaning = ""
    if number == signal.SIGKILL:
        meaning = ", which the system sends when memory runs out"
    elif number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        meaning = ", as compiled code does that reads what fake tensors do not have"
    return f"{name} was ended{place} by {what}{meaning}: {_WAYS_OUT}"


_FIRST_OTHER = 3  # descriptors below are standard input, output and error


def mute(keep: Collection[int]) -> None:
    """Let nothing that this process writes arrive anywhere, for good; only for a copy that will end.

    What is open for writing (standard output and error, files, connections) leads nowhere from now on, and so do files
    that are opened for writing. Reading is as before. Other pipes stay: by one of them the original process is told
    that this one has ended.

    Args:
        keep: Descriptors of this process's own that go on working.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    for descriptor in sorted(found - set(keep) - {nowhere}):
        if descriptor in (1, 2) or (descriptor >= _FIRST_OTHER and _is_written(descriptor)):
            os.dup2(nowhere, descriptor)
    _redirect_opening()


def _is_written(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    except OSError:
        return False  # it was the listing's own and is closed again
    if not (stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return False
    return flags & os.O_ACCMODE != os.O_RDONLY


def _redirect_opening() -> None:
    original = builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int) and any(letter in mode for letter in "wax+"):
            file, mode = os.devnull, mode.replace("x", "w")
        return original(file, mode, *args, **kwargs)

    accessor: Any = getattr(pathlib, "_NormalAccessor", io)  # Python 3.10's methods of paths look it up there
    builtins.open = io.open = accessor.open = opened if accessor is io else staticmethod(opened)
