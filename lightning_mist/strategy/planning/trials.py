"""Trying the user's code before training without leaving a trace.

Where this process can be copied, code is tried in a copy: whatever it changes there (counters on classes, globals,
iterators, metrics, files, what it prints) is gone with the copy. On a CUDA device nothing can be computed in a copy;
there it runs here, isolated as far as a process can be.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_mist.errors import MistError, TraceError
from lightning_mist.model import run_apart
from lightning_mist.model.child_process import can_fork

T = TypeVar("T")

PATIENCE_SECONDS = 600.0
"""After so long a trial is given up: the largest networks of our tests take a fifth of it."""

CALLS = 8
"""How often the user's step may be called beside training where that leaves traces."""


def tried(work: Callable[..., T], device: torch.device, *, tell: Callable[[str], None] | None = None) -> T:
    """What some work of ours on the user's code gives, tried in a copy of this process if that is possible.

    Args:
        work: What to do; its result must be picklable.
        device: Where the module computes.
        tell: Told what the work says with its argument ``tell``; only where it runs in a copy.

    Raises:
        TraceError: If the work fails with anything but an error of this package, whose cause it then is.
    """
    try:
        if leaves_no_trace(device):
            return run_apart(work, method="fork", muted=True, tell=tell, limit_seconds=PATIENCE_SECONDS)
        return work()
    except MistError:
        raise
    except Exception as error:
        raise TraceError(f"trying it before training failed: {type(error).__name__}: {error}") from error


def leaves_no_trace(device: torch.device) -> bool:
    """Whether trials run in a copy of this process."""
    return device.type == "cpu" and can_fork(threads=True)


def timed_apart(device: torch.device) -> bool:
    """Whether what is timed in a copy takes as long as here: the threads of parallel loops do not come along."""
    return leaves_no_trace(device) and torch.get_num_threads() == 1


def progress_through(tell: Callable[[str], None] | None, update: Callable[[str, float], None]) -> Any:
    """How a trial says how far it has come: here, or through ``tell`` from a copy."""
    if tell is None:
        return update
    return lambda text, fraction: tell(f"{fraction} {text}")


def told(update: Callable[[str, float], None]) -> Callable[[str], None]:
    """Hears what :func:`progress_through` says in a copy."""

    def hear(line: str) -> None:
        fraction, _, text = line.partition(" ")
        update(text, float(fraction))

    return hear
