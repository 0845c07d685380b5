"""Runs the ``main`` of a module as the ranks of a world: ``python -m tests.ranks 2 package.module argument ...``.

For it this is torchrun, but for one thing: everything is imported once, before the ranks part. Importing torch and
Lightning takes a rank as long as training twenty small networks.
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

_DIGITS = 5
"""Of a port."""


def command_of(processes: int, module: str, *arguments: str) -> list[str]:
    """What to run."""
    return [sys.executable, "-m", "tests.ranks", str(processes), module, *arguments]


def environment() -> dict[str, str]:
    """With what variables to run it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


def _run(module: ModuleType, rank: int, count: int, reading: int) -> None:
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
    module.main()


def main(arguments: Sequence[str]) -> int:
    """Run the ranks, and end them all if one fails."""
    count, module = int(arguments[0]), importlib.import_module(arguments[1])
    sys.argv = [str(module.__file__), *arguments[2:]]
    reading, writing = os.pipe()
    ranks = set()
    for rank in range(count):
        child = os.fork()
        if child:
            ranks.add(child)
            continue
        code = 1
        try:
            _run(module, rank, count, reading)
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
        if status:
            failed = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
