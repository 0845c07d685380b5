"""Custom autograd functions, which take tensors past Python's torch functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch._functorch.utils
from torch.autograd import Function

from lightning_mist.tensor_parallel.tensor import SplitTensor, gathered, leaves_of, whole


class _Patch:
    """Counts who computes with split tensors; while anybody does, autograd functions get whole ones.

    ``Function.apply`` hands its arguments to C++, which knows nothing of parts: a gradient would be lost. It is
    replaced, and so is ``torch._functorch.utils.unwrap_dead_wrappers``, which methods ``apply`` that user code bound
    long before look up at each call. Stages in several threads enter and leave in
    any order: the last to leave restores both.
    """

    def __init__(self) -> None:
        self._lock, self._count = Lock(), 0
        self._apply, self._unwrap = Function.__dict__["apply"], torch._functorch.utils.unwrap_dead_wrappers

    def enter(self) -> None:
        """Replace torch's functions unless they are."""
        with self._lock:
            if self._count == 0:
                self._replace()
            self._count += 1

    def leave(self) -> None:
        """Restore torch's functions if nobody else needs them replaced."""
        with self._lock:
            self._count -= 1
            if self._count == 0:
                Function.apply = self._apply  # type: ignore[method-assign]
                torch._functorch.utils.unwrap_dead_wrappers = self._unwrap

    def _replace(self) -> None:
        apply_, unwrap_ = Function.__dict__["apply"], torch._functorch.utils.unwrap_dead_wrappers
        self._apply, self._unwrap = apply_, unwrap_

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            split = [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, SplitTensor)]
            if split:
                split[0].context.gathered[cls.__name__] += 1
                # Modes that watch the computation must see what its author wrote and nothing else.
                with torch._C.DisableTorchFunction():
                    args, kwargs = whole(args), whole(kwargs)
            return apply_.__get__(None, cls)(*args, **kwargs)

        def unwrap(args: tuple[Any, ...]) -> tuple[Any, ...]:
            for arg in args:
                if isinstance(arg, SplitTensor):
                    arg.context.gathered["autograd.Function"] += 1
            with torch._C.DisableTorchFunction():
                args = tuple(gathered(arg) if isinstance(arg, SplitTensor) else arg for arg in args)
            return unwrap_(args)

        Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
        torch._functorch.utils.unwrap_dead_wrappers = unwrap


_PATCH = _Patch()


@contextmanager
def functions_of_wholes() -> Iterator[None]:
    """Inside, custom autograd functions get whole tensors in place of split ones; outside these are refused."""
    _PATCH.enter()
    try:
        yield
    finally:
        _PATCH.leave()
