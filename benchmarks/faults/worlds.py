"""Runs many small worlds of processes that are forked from this one, and says how each of them ended.

Importing torch and Lightning takes longer than a fit of a small network: here it is done once. The ranks of a world
find each other as those that Lightning's own launcher starts, through a store in the first of them, but nobody looks
after them: that all of them end is up to themselves.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path

HARM = "harm"
"""The file that a rank writes in the moment before it comes to harm."""

LONGEST_SECONDS = 300.0
"""What a world may take to come to where it is harmed, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How a world ended.

    Attributes:
        codes: Exit codes of its ranks; negative numbers of the signals that ended them; None for one that did not end.
        seconds: From the harm to the end of the last rank; None if there was none.
        output: What all ranks have written, one after the other.
    """

    codes: tuple[int | None, ...]
    seconds: float | None
    output: str


@dataclass(slots=True, kw_only=True)
class _World:
    folder: Path
    ranks: dict[int, int]
    started: float
    codes: dict[int, int] = field(default_factory=dict)

    def harmed(self) -> float | None:
        file = self.folder / HARM
        return file.stat().st_mtime if file.is_file() else None


def run_worlds(
    main: Callable[[str, Path], None],
    names: Sequence[str],
    folder: Path,
    *,
    ranks: int = 2,
    jobs: int = 2,
    seconds: float = 60.0,
    tell: Callable[[str, Fate], None] = lambda name, fate: None,
) -> dict[str, Fate]:
    """Run worlds side by side.

    Args:
        main: What each rank runs, with the world's name and folder; ``LOCAL_RANK`` says which it is.
        names: Names of the worlds.
        folder: Where their folders are made.
        ranks: Ranks of each.
        jobs: How many worlds run at the same time.
        seconds: How long after the harm all ranks must have ended; then the others are killed.
        tell: Told of every fate.
    """
    waiting, running, fates = list(names), dict[str, _World](), dict[str, Fate]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[name] = _start(main, name, folder / name.replace("/", "_"), ranks)
        time.sleep(0.05)
        for name, world in list(running.items()):
            _look(world)
            harmed, now = world.harmed(), time.time()
            is_late = now - world.started > LONGEST_SECONDS if harmed is None else now - harmed > seconds
            if len(world.codes) == ranks or is_late:
                del running[name]
                fates[name] = _end(world, None if harmed is None else now - harmed)
                tell(name, fates[name])
    return fates


def _start(main: Callable[[str, Path], None], name: str, folder: Path, ranks: int) -> _World:
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.setsid()
            _be(main, name, folder, rank, port)
        children[child] = rank
    return _World(folder=folder, ranks=children, started=time.time())


def _be(main: Callable[[str, Path], None], name: str, folder: Path, rank: int, port: int) -> None:
    """Run as a rank, and never return."""
    code = 1
    try:
        output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(line_buffering=True, write_through=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        main(name, folder)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _look(world: _World) -> None:
    for child, rank in world.ranks.items():
        if rank not in world.codes:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                world.codes[rank] = os.waitstatus_to_exitcode(status)


def _end(world: _World, seconds: float | None) -> Fate:
    for child, rank in world.ranks.items():
        if rank not in world.codes:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    logs = (world.folder / f"rank{rank}.log" for rank in sorted(world.ranks.values()))
    output = "".join(f"rank {path.stem[4:]}:\n{path.read_text(errors='replace')}" for path in logs if path.is_file())
    codes = tuple(world.codes.get(rank) for rank in sorted(world.ranks.values()))
    return Fate(codes=codes, seconds=seconds, output=output)
