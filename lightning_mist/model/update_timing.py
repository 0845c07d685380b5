"""Seconds of the optimizer's step, measured on copies of the parameters with the user's own optimizer and settings."""

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LARGEST_BYTES = 2**26
"""Parameters beyond so many bytes are left out: with their gradients and states they are far larger than any cache, and
what a byte of them takes no longer changes."""

WARM_UP, STEPS = 2, 5
"""Steps that make the state and find it warm, and steps that are timed."""


def time_update(optimizer: Optimizer, *, device: torch.device) -> float:
    """Seconds of one step per byte of the parameters that it updates.

    The optimizer and its parameters, which may have no values, stay as they are. Ranks that share a machine should call
    this at the same time.

    Args:
        optimizer: The optimizer; another of its class is made with the same groups.
        device: Where parameters live in training.

    Returns:
        The seconds, or 0 if the optimizer cannot be made or stepped like that (its class asks for more than groups, or
        its step for a closure).
    """
    groups, total = _copies(optimizer, device)
    if total == 0:
        return 0.0
    made: Any = type(optimizer)
    try:
        probe = made(groups)
        seconds = []
        for index in range(WARM_UP + STEPS):
            _synchronize(device)
            start = perf_counter()
            probe.step()
            _synchronize(device)
            if index >= WARM_UP:
                seconds.append(perf_counter() - start)
    except Exception:
        # Whatever a foreign optimizer raises: its time then follows from the bytes it moves, as without measuring.
        return 0.0
    return median(seconds) / total


def _copies(optimizer: Optimizer, device: torch.device) -> tuple[list[dict[str, Any]], int]:
    """Groups with new parameters that have gradients, and their bytes."""
    groups: list[dict[str, Any]] = []
    total = 0
    for group in optimizer.param_groups:
        parameters = []
        for parameter in group["params"]:
            size = parameter.numel() * parameter.element_size()
            if not parameter.requires_grad or (total and total + size > LARGEST_BYTES):
                continue
            total += size
            parameters.append(_copy(parameter, device))
        if parameters:
            groups.append({**group, "params": parameters})
    return groups, total


def _copy(parameter: Tensor, device: torch.device) -> Tensor:
    # Ones rather than random numbers: the user's random state must not change, and nothing here depends on values.
    copy = torch.ones(parameter.shape, dtype=parameter.dtype, device=device).requires_grad_(True)
    copy.grad = torch.full_like(copy, 1e-3)
    return copy


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
