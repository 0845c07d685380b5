"""Functions in processes of their own: once, as the ranks of a world, or in processes that stay up for a session.

All are forked from one process that has imported what they need: importing torch and Lightning takes a rank as long as
training twenty small networks.
"""

import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fits import quiet
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_TIMEOUT_SECONDS = 90.0
"""How long a function may take, and how long gloo waits for a peer; generous, since machines may be busy."""


_PRELOAD = [
    "pytest",
    "tests.integration.parity",
    "tests.traps.run",
    "tests.zoo",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "t5", "vit")),
]


def forks() -> "ForkServerContext":
    """Makes processes by forking one that has imported what they need, once, and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class GlooWorkers:
    """``size`` processes. Each call makes a new world of its first ranks, so one failure does not reach the next."""

    def __init__(self, size: int) -> None:
        context = forks()
        self._directory = tempfile.TemporaryDirectory()
        self._calls = 0
        self._connections, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on ranks ``0 .. world_size-1`` with a default process group; what each returned."""
        self._calls += 1
        store = str(Path(self._directory.name) / f"store{self._calls}")
        connections = self._connections[:world_size]
        for connection in connections:
            connection.send((store, world_size, function, args))
        answers = []
        for rank, connection in enumerate(connections):
            if not connection.poll(_TIMEOUT_SECONDS + 30):
                raise TimeoutError(f"rank {rank} of {world_size} did not answer")
            answers.append(connection.recv())
        failures = [f"rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
        if failures:
            raise AssertionError("\n".join(failures))
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
            connection.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()


def _serve(rank: int, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (call := connection.recv()) is not None:
        store, world_size, function, args = call
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=_TIMEOUT_SECONDS),
            )
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)
    # Tearing an interpreter full of libraries down takes seconds and serves nobody.
    os._exit(0)


def apart(function: Callable[..., Any], *args: Any, seconds: float = 280.0, printed: Path | None = None) -> Any:
    """What a function gives in a process that has imported everything, and has no threads of others when it forks.

    Args:
        function: Of a module.
        *args: For it.
        seconds: How long it may take.
        printed: Where what it prints goes, if it is asked for.

    Raises:
        AssertionError: If it raises or takes longer, with the end of what was printed.
    """
    with tempfile.TemporaryDirectory() as directory:
        answer, said = Path(directory) / "answer", printed or Path(directory) / "printed"
        said.touch()
        process = forks().Process(target=_answer, args=(function, args, dict(os.environ), answer, said))
        process.start()
        process.join(seconds)
        if process.is_alive() and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        assert answer.exists(), f"{function.__name__}: {said.read_text(errors='replace')[-8000:]}"
        return pickle.loads(answer.read_bytes())


def _answer(function: Callable[..., Any], args: Any, environment: dict[str, str], answer: Path, said: Path) -> None:
    os.setpgid(0, 0)
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    quiet()
    os.environ.clear()
    os.environ.update(environment)
    answer.write_bytes(pickle.dumps(function(*args)))


def forked(work: Callable[[], Any], folder: Path, *, seconds: float) -> tuple[list[Any], bool, str]:
    """Two ranks of which the world ends whatever becomes of them; of a process without threads of others.

    Args:
        work: What each does; it writes ``rank0.json`` or ``rank1.json`` into the folder.
        folder: To be made.
        seconds: How long they may take.

    Returns:
        What each wrote, or ``None``; whether time ran out; what was printed.
    """
    folder.mkdir(parents=True)
    printed = folder / "printed.txt"
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with printed.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(run_ranks(2, work, patience_seconds=30.0))
    end = time.monotonic() + seconds
    while (is_late := time.monotonic() > end) is False and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.02)
    if is_late:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return found, is_late, printed.read_text(errors="replace")


def launched(function: Callable[..., Any], *args: Any, world: int = 2, **options: Any) -> list[Any]:
    """What a function of a module gives on every rank of a world that is started as torchrun starts one.

    Args:
        function: Of a module.
        *args: For it.
        world: How many ranks.
        **options: Those of :func:`apart`.

    Raises:
        AssertionError: If a rank raises, with its traceback; the others are ended then.
    """
    answers: list[Any] = apart(_ranks, function, args, world, **options)
    return answers


def _ranks(function: Callable[..., Any], args: Any, world: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / str(rank) for rank in range(world)]

        def work() -> None:
            files[int(os.environ["RANK"])].write_bytes(pickle.dumps(function(*args)))

        if run_ranks(world, work):
            raise AssertionError(f"{function.__name__} failed on a rank")
        return [pickle.loads(file.read_bytes()) for file in files]
