"""A copied process that tries the user's code and leaves nothing behind: no line, no file, no message."""

import builtins
import fcntl
import io
import os
import stat
from collections.abc import Collection
from typing import Any

_FIRST_OTHER = 3
"""Descriptors below are standard input, output and error."""


def mute(keep: Collection[int]) -> None:
    """Let nothing that this process writes arrive anywhere, for good; only for a copy that will end.

    What is open for writing (standard output and error, files, connections) leads nowhere from now on, and so do files
    that are opened for writing. Reading is as before. Other pipes stay: by one of them the original process is told
    that this one has ended.

    Args:
        keep: Descriptors of this process's own that go on working.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in sorted(_open_descriptors() - set(keep) - {nowhere}):
        if descriptor in (1, 2) or (descriptor >= _FIRST_OTHER and _is_written(descriptor)):
            os.dup2(nowhere, descriptor)
    _redirect_opening()


def _open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


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
    """Let ``open`` with a mode that writes open the null device."""
    original = builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int) and any(letter in mode for letter in "wax+"):
            file, mode = os.devnull, mode.replace("x", "w")
        return original(file, mode, *args, **kwargs)

    builtins.open = opened
    io.open = opened  # methods of paths look it up there
