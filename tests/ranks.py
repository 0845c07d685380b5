"""Runs a function as the ranks of a world.

For it this is torchrun, but for one thing: everything is imported once, before the ranks part. Importing torch and
Lightning takes a rank as long as training twenty small networks.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

_DIGITS = 5
"""Of a port."""


def environment() -> dict[str, str]:
    """With what variables to run it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


def _run(work: Callable[[], None], rank: int, count: int, reading: int) -> None:
    """A rank, once it is told the port."""
    # Whole lines: without buffering a line and its end are written one after the other, and those of ranks mix.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        GROUP_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(int(os.read(reading, _DIGITS))),
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    work()


def run_ranks(count: int, work: Callable[[], None], *, patience_seconds: float = 0.0) -> int:
    """Run a function as every rank of a world, and end them all if one fails.

    Args:
        count: How many ranks.
        work: What each does, in a process of its own, with torchrun's variables set.
        patience_seconds: How long the others may go on when one has failed.

    Returns:
        The status to exit with: 0 if none failed.
    """
    reading, writing = os.pipe()
    ranks = set()
    for rank in range(count):
        child = os.fork()
        if child:
            ranks.add(child)
            continue
        code = 1
        try:
            _run(work, rank, count, reading)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    from torch.distributed import TCPStore

    # Only now, since it has a thread; a port of the system's choice, so that runs side by side do not meet.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(writing, f"{store.port:0{_DIGITS}d}".encode() * count)
    failed = 0
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status and not failed:
            failed = 1
            if patience_seconds:
                timer = threading.Timer(patience_seconds, _kill, (ranks,))
                timer.daemon = True
                timer.start()
            else:
                _kill(ranks)
    return failed


def _kill(ranks: set[int]) -> None:
    for rank in tuple(ranks):
        os.kill(rank, signal.SIGKILL)
