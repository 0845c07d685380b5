"""Seconds of the optimizer's step, measured on copies of the parameters with the user's own optimizer and settings.

On a CPU a step's seconds over its bytes are what a byte takes. On a device part of them is the host's, launching a step
that is over before the next one is launched, and does not grow with the parameters: two sizes are timed there, and what
a byte takes is the difference.
"""

import math
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mist.devices import ops_of
from lightning_mist.optimizers import is_torchs, like

LARGEST_BYTES = 2**26
"""Parameters beyond so many bytes are left out, or copied in part: with their gradients and states they are far larger
than any cache, and what a byte of them takes no longer changes."""

COPIES = 8
"""Times the bytes of its parameters that a step takes at most: values, gradients, two or three states, temporaries."""

WARM_UP, STEPS = 2, 5  # steps that make the state and find it warm, and steps that are timed


def time_update(
    optimizer: Optimizer, *, device: torch.device, room: float = math.inf, dtype: torch.dtype | None = None
) -> float:
    """Seconds of one step per byte of the parameters that it updates.

    The optimizer and its parameters, which may have no values, stay as they are. Ranks that share a machine should call
    this at the same time.

    Args:
        optimizer: The optimizer; another like it is made with the same groups.
        dtype: Type of the parameters that it will step on, if that is another one than they have now.
        room: Bytes that there are for copies of parameters, their gradients, state, and what a step makes meanwhile.

    Returns:
        The seconds, or 0 if the optimizer cannot be made or stepped like that (its class asks for more than groups, or
        its step for a closure), or if what a byte takes is lost in what launching takes.
    """
    try:
        seconds, total = _step(optimizer, device, int(min(LARGEST_BYTES, max(0.0, room) / COPIES)), dtype)
        if total == 0 or device.type == "cpu":
            return seconds / max(1, total)
        less, part = _step(optimizer, device, total // 2, dtype)
    except Exception:
        # Whatever a foreign optimizer raises: its time then follows from the bytes it moves, as without measuring.
        return 0.0
    return per_byte((part, less), (total, seconds))


def per_byte(smaller: tuple[int, float], larger: tuple[int, float]) -> float:
    """Seconds of a byte, from bytes and seconds of two steps; 0 where the larger one took no longer."""
    (part, less), (total, seconds) = smaller, larger
    return max(0.0, seconds - less) / (total - part) if total > part else 0.0


def _step(
    optimizer: Optimizer, device: torch.device, largest_bytes: int, dtype: torch.dtype | None
) -> tuple[float, int]:
    """Seconds of one step of at most so many bytes of parameters, and the bytes."""
    ops, (groups, total) = ops_of(device), _copies(optimizer, device, largest_bytes, dtype)
    if total == 0:
        return 0.0, 0
    made: Any = type(optimizer)
    # Some of torch's make state when they are made; what others are made with is in them and not in their groups.
    probe = made(groups) if is_torchs(optimizer) else like(optimizer, groups)
    seconds = []
    for index in range(WARM_UP + STEPS):
        ops.synchronize()
        start = perf_counter()
        probe.step()
        ops.synchronize()
        if index >= WARM_UP:
            seconds.append(perf_counter() - start)
    return median(seconds), total


def _copies(
    optimizer: Optimizer, device: torch.device, largest_bytes: int, dtype: torch.dtype | None = None
) -> tuple[list[dict[str, Any]], int]:
    groups: list[dict[str, Any]] = []
    total = 0
    for group in optimizer.param_groups:
        parameters = []
        for parameter in group["params"]:
            size = parameter.numel() * (dtype or parameter.dtype).itemsize
            if not parameter.requires_grad or (total and total + size > largest_bytes):
                continue
            parameters.append(_copy(parameter, device, largest_bytes, dtype or parameter.dtype))
            total += parameters[-1].numel() * parameters[-1].element_size()
        if parameters:
            # Some optimizers keep scratch space in their groups, which is the user's.
            settings = deepcopy({name: value for name, value in group.items() if name != "params"})
            groups.append({**settings, "params": parameters})
    return groups, total


def _copy(parameter: Tensor, device: torch.device, largest_bytes: int, dtype: torch.dtype) -> Tensor:
    shape = list(parameter.shape)
    if shape and parameter.numel():
        # Of one that is too large by itself, as many rows as there is room for.
        row = parameter.numel() // shape[0] * dtype.itemsize
        shape[0] = min(shape[0], max(1, largest_bytes // row))
    # Ones rather than random numbers: the user's random state must not change, and nothing here depends on values.
    copy = torch.ones(shape, dtype=dtype, device=device).requires_grad_(True)
    copy.grad = torch.full_like(copy, 1e-3)
    return copy
