"""Running a function in a process of its own, whose end is not ours.

A trace runs the user's code, and whatever that calls, on tensors that some extensions do not expect: a kernel that
reads a fake tensor's memory ends the process, and no ``except`` helps. So traces that nobody needs to share a process
with run in a child, and what ends the child becomes an error here, with the place where it was.
"""

import builtins
import faulthandler
import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import re
import signal
import stat
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar

from lightning_mist.errors import TraceError

T = TypeVar("T")

Tell = Callable[[str], None]

_WAYS_OUT = (
    "give the operator that ends it a fake kernel (torch.library.register_fake), or leave it out of training_step"
)

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)

_NOT_THE_USERS = ("/torch/", "/lightning_mist/", "/multiprocessing/", "<frozen", "/ctypes/")


class RemoteTraceback(Exception):  # noqa: N818 - it is where an error comes from, not what went wrong
    """The traceback of an error in the child, as text; the cause of the error here."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def can_fork(*, threads: bool = False) -> bool:
    """Whether a copy of this process can compute: no device is in use, which no fork survives, and no other thread.

    Args:
        threads: Whether there may be other threads, of which nothing is needed in the copy.
    """
    from lightning_mist.devices import used_generators

    is_alone = threads or threading.active_count() == 1
    return sys.platform == "linux" and is_alone and not used_generators()


def run_apart(
    function: Callable[..., T],
    /,
    *args: Any,
    tell: Tell | None = None,
    limit_seconds: float | None = None,
    method: Literal["fork", "spawn"] | None = None,
    muted: bool = False,
    **kwargs: Any,
) -> T:
    """Call a function in another process and return what it returns.

    Args:
        function: Anything where this process can be copied; otherwise a function of a module, with arguments that can
            be pickled. Its result must be picklable.
        tell: Called here with every text that the function says, which then gets a keyword argument ``tell`` to say it.
        limit_seconds: After this time the child is ended.
        method: How the process is made; by default a copy of this one where that is safe, else a new one.
        muted: Whether nothing that the other process writes is to arrive anywhere.

    Raises:
        TraceError: If the child ends without a result, does not end in time, or its result cannot be sent.
        Exception: What the function raised, with the child's traceback as its cause; a :class:`TraceError` with its
            text if it cannot be sent.
    """
    context = multiprocessing.get_context(method or ("fork" if can_fork() else "spawn"))
    ours, theirs = context.Pipe(duplex=False)
    name = getattr(function, "__qualname__", repr(function))
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
            kind, content = _answer(ours, process, tell, limit_seconds, last_words)
        finally:
            if process.pid is not None:
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
            "or CUDA is in use), so the function and its arguments must be picklable: give a function of a module"
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
    with last_words.open("w") as file:
        # Where it is on already it takes another file, but not the signals back that somebody took from it.
        faulthandler.disable()
        faulthandler.enable(file, all_threads=False)
        if muted:
            mute(keep=(pipe.fileno(), file.fileno()))
        _work(pipe, function, args, kwargs, tells)


def _work(pipe: Connection, function: Callable[..., Any], args: Any, kwargs: Any, tells: bool) -> None:
    import torch

    # The threads of parallel loops did not come along.
    torch.set_num_threads(1)
    if tells:
        kwargs = {**kwargs, "tell": lambda text: pipe.send(("told", text))}
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        _send_error(pipe, error)
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
    pipe: Connection, process: Any, tell: Tell | None, limit_seconds: float | None, last_words: Path
) -> tuple[str, Any]:
    end = None if limit_seconds is None else monotonic() + limit_seconds
    while True:
        ready = wait([pipe, process.sentinel], None if end is None else max(0.0, end - monotonic()))
        if not ready:
            raise TraceError(
                f"{process.name} has not ended within {limit_seconds} s and was given up: {_WAYS_OUT}, or allow more "
                "time"
            )
        if pipe in ready:
            try:
                kind, content = _read(pipe)
            except EOFError:
                # Closed without a word: the child is gone or about to be.
                raise _end_of(process, last_words) from None
            if kind != "told":
                return kind, content
            if tell is not None:
                tell(content)
        else:
            raise _end_of(process, last_words)


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
    place = next((frame for frame in frames if not any(part in frame for part in _NOT_THE_USERS)), None)
    error = TraceError(_how_it_ended(process.name, process.exitcode, "" if place is None else f" at {place}"))
    if text:
        error.__cause__ = RemoteTraceback(text)
    return error


def _how_it_ended(name: str, status: int, place: str) -> str:
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

    builtins.open = opened
    io.open = opened  # methods of paths look it up there
