"""What one plain step allocates at its peak, roughly: one run on fake tensors."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import device_of, isolated, quiet_fakes, substitute_parameters
from lightning_mist.model.trace.counted_step import Subject, count_step


def step_bytes(module: nn.Module, call: Callable[[Any], Any], batch: Any) -> int:
    """Bytes alive at the peak of forward and backward, gradients included, parameters not.

    Args:
        module: The user's module; left as it was.
        call: Runs its step on a batch.
        batch: A batch.

    Raises:
        TraceError: If the step does not run on fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with isolated(module), quiet_fakes():
        parameters = tuple(substitute_parameters(module, mode, {}, device_of(batch)).values())
        subject = Subject(module=module, blocks=(), parameters=parameters, mode=mode, call=call, context=nullcontext)
        try:
            return max(count_step(subject, batch, twins=(), recompute=False, gradients_exist=False).timeline)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(f"the step does not run on fake tensors: {type(error).__name__}: {error}") from error
