"""A user's step may not run a backward of its own while parameters behind it are not here."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import TracingContext

from lightning_mist.errors import TraceError
from lightning_mist.runtime.shared_patch import SharedPatch

_HERE = threading.local()


@contextmanager
def refused_backward() -> Iterator[None]:
    """Inside, this thread may not run a backward; see :class:`~lightning_mist.errors.TraceError`."""
    _HERE.is_in_step = True
    try:
        with _GUARDED:
            yield
    finally:
        _HERE.is_in_step = False


@contextmanager
def _guarded_backward() -> Iterator[None]:
    """Inside, a thread that runs a user's step may not run a backward; ``torch.autograd`` has no hook for it."""
    module: Any = torch.autograd
    original = module._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        # A compiler that traces a part of the step differentiates what it has traced, on tensors without values.
        is_compiling = TracingContext.try_get() is not None
        if getattr(_HERE, "is_in_step", False) and not is_compiling:
            raise TraceError(
                "the step runs a backward of its own (torch.autograd.grad or Tensor.backward): under zero_stage 3, and "
                "where parameters are offloaded, those of the layers behind it are freed by then; use zero_stage=2 and "
                "offload.parameters=0"
            )
        return original(*args, **kwargs)

    module._engine_run_backward = run
    try:
        yield
    finally:
        module._engine_run_backward = original


_GUARDED = SharedPatch(_guarded_backward)
