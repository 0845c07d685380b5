"""Process-wide changes that several users hold at the same time."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class SharedPatch:
    """A context that changes process-wide state while anyone is inside it.

    The first that enters makes the change and the last that leaves undoes it, in any order and on any thread: ranks
    that share a process take turns inside their steps, so a change that each undid for itself would be undone while
    another still needs it, or restore what another had made.

    Args:
        make: Gives the context that changes the state and restores it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._change: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._change is None:
                change = self._make()
                change.__enter__()
                self._change = change
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._change is not None:
                change, self._change = self._change, None
                change.__exit__(None, None, None)
