"""Custom autograd functions, which take tensors past Python's torch functions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch._functorch.utils


class _Guard:
    """Counts who computes with split tensors; while anybody does, autograd functions get whole tensors.

    ``torch.autograd.Function.apply`` hands its arguments to C++, which knows nothing of parts: a gradient would be lost
    without a word. Methods ``apply`` are bound by user code and libraries long before; what all of them look up at
    each call is ``torch._functorch.utils.unwrap_dead_wrappers``, so this is replaced. Stages in several threads enter
    and leave in any order: the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock, self._count = Lock(), 0
        self._original: Callable[..., Any] | None = None

    def enter(self, replacement: Callable[..., Any]) -> None:
        """Replace torch's function unless it is replaced."""
        with self._lock:
            if self._count == 0:
                self._original = torch._functorch.utils.unwrap_dead_wrappers
                torch._functorch.utils.unwrap_dead_wrappers = replacement
            self._count += 1

    def leave(self) -> None:
        """Restore torch's function if nobody else needs it replaced."""
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._original is not None:
                torch._functorch.utils.unwrap_dead_wrappers = self._original
                self._original = None

    def unwrap(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What torch's own function does."""
        original = self._original
        return original(args) if original is not None else args


_GUARD = _Guard()


@contextmanager
def functions_of_wholes() -> Iterator[None]:
    """Inside, custom autograd functions get whole tensors in place of split ones; outside these are refused."""
    from lightning_mist.tensor_parallel.tensor import SplitTensor, gathered

    def unwrap(args: tuple[Any, ...]) -> tuple[Any, ...]:
        for arg in args:
            if isinstance(arg, SplitTensor):
                arg.context.gathered["autograd.Function"] += 1
        return _GUARD.unwrap(tuple(gathered(arg) if isinstance(arg, SplitTensor) else arg for arg in args))

    _GUARD.enter(unwrap)
    try:
        yield
    finally:
        _GUARD.leave()
