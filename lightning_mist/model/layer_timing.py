"""Seconds of every kind of layer inside the real step, and of the optimizer's, measured on the device at hand.

The user's step runs on real numbers at several batch sizes. One block of each kind runs, the others imitate it, so that
memory holds the head, the tail and one block; gradients are accumulated, as in all microbatches but the first.
Parts are told apart by timestamps where blocks begin, in backward where their inputs' gradients arrive. Blocks that the
user compiles are timed as compiled code.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mist.devices import ops_of
from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import isolated, substitute_parameters
from lightning_mist.model.spec import LayerSeconds, ModelSpec
from lightning_mist.model.trace import Kinds, Walk, cost_keys, count_step, group, isolated_subject, loss_of, module_key
from lightning_mist.optimizers import is_torchs, like
from lightning_mist.plan import ModuleMap
from lightning_mist.tensors import copy_batch
from lightning_mist.without_values import fake_mode

_MAX_ROUNDS = 15
_MIN_ROUNDS = 3
_OUTLIER = 4.0
"""Samples further above the median than this many median absolute deviations are disturbances (about 2.7 sigma of a
normal distribution, for which sigma is 1.48 deviations)."""

Samples = dict[tuple[int, bool, int], list[float]]
"""Seconds by part, direction (whether backward) and rows."""


def _timed_step(
    blocks: tuple[nn.Module, ...],
    twins: tuple[int | None, ...],
    call: Callable[[Any], Any],
    device: torch.device,
    batch: Any,
) -> Iterator[tuple[int, bool, float]]:
    """One step; part, direction and seconds of everything between two marks, which wait for nothing."""
    ops = ops_of(device)
    parts: list[tuple[int, bool]] = []
    marks: list[Any] = []

    def enter(part: int, backward: bool) -> None:
        parts.append((part, backward))
        marks.append(ops.record(timed=True))

    walk = Walk(blocks, twins, enter, recompute=False, natural=True, mode=None, keep_values=True)
    with walk.step(), torch.enable_grad():
        enter(0, False)
        value = call(copy_batch(batch))
        loss = loss_of(value)
        walk.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(ops.record(timed=True))
    ops.synchronize()
    for (part, backward), (start, end) in zip(parts, pairwise(marks), strict=True):
        yield part, backward, ops.seconds(start, end)


def _kinds(
    module: nn.Module, module_map: ModuleMap, blocks: tuple[nn.Module, ...], call: Callable[[Any], Any], batch: Any
) -> Kinds:
    """Sort the blocks by what they cost in one step on fake tensors; each for itself if it does not run on those."""
    names = [type(block).__name__ for block in blocks]
    if not blocks:
        return Kinds(labels=(), examples=(), of=())
    mode = fake_mode()
    with isolated_subject(module, call, batch, blocks=module_map.blocks, mode=mode) as subject:
        try:
            count = count_step(subject, batch, twins=(None,) * len(blocks), recompute=False, gradients_exist=True)
        except Exception:
            # Data-dependent steps have no fake run. Taking every block for a kind of its own needs nothing but time.
            return group(names, [(module_key(block), i) for i, block in enumerate(blocks)])
    leaking = set(module_map.leaking_blocks)
    costs = cost_keys(blocks, (count,))
    # A block whose output or inner values are needed as they are is run itself: a kind of its own.
    alone = [i if i in leaking or not count.describable[i] else None for i in range(len(blocks))]
    return group(names, list(zip(costs, alone, strict=True)))


def _measure(
    step: Callable[[Any], Iterator[tuple[int, bool, float]]],
    batches: dict[int, Any],
    budget_seconds: float,
    progress: Callable[[str, float], None] | None,
    most_calls: int | None,
) -> Samples:
    """Warm up, then go round all sizes again and again until the time or the calls are used up."""
    rounds = _MAX_ROUNDS if most_calls is None else min(_MAX_ROUNDS, max(1, (most_calls - 1) // len(batches) - 1))
    samples: Samples = {}
    start = time.perf_counter()
    for batch in batches.values():
        list(step(batch))
    for done in range(rounds):
        elapsed = time.perf_counter() - start
        if done >= _MIN_ROUNDS and elapsed * (done + 2) / (done + 1) > budget_seconds:
            break
        if done >= 1 and elapsed > budget_seconds:
            break
        if progress is not None:
            progress("timing the layers", min(0.99, max(elapsed / budget_seconds, done / rounds)))
        for rows, batch in batches.items():
            for part, backward, seconds in step(batch):
                samples.setdefault((part, backward, rows), []).append(seconds)
    if progress is not None:
        progress("timing the layers", 1.0)
    return samples


def robust_median(samples: Sequence[float]) -> float:
    """Median of samples without outliers above."""
    middle = median(samples)
    deviation = median(abs(x - middle) for x in samples)
    return median(x for x in samples if x <= middle + _OUTLIER * deviation)


def _layer_seconds(
    samples: Samples, rows: tuple[int, ...], kind: str, part: int, layers: tuple[int, ...]
) -> LayerSeconds:
    forward, backward = (
        tuple(robust_median(samples.get((part, backward, size), [0.0])) for size in rows) for backward in (False, True)
    )
    return LayerSeconds(kind=kind, rows=rows, forward=forward, backward=backward, layers=layers)


def time_layers(
    module: nn.Module,
    described: ModelSpec | ModuleMap,
    batch_for_rows: Callable[[int], Any],
    rows: Sequence[int],
    call: Callable[[Any], Any],
    *,
    device: torch.device,
    progress: Callable[[str, float], None] | None = None,
    budget_seconds: float = 5.0,
    most_calls: int | None = None,
) -> tuple[LayerSeconds, ...]:
    """Measure seconds of forward and backward of the head, of every kind of block, and of the tail.

    The module, its gradients, buffers and random state are afterwards as before. Ranks that share a machine should call
    this at the same time: that they disturb one another is part of the truth.

    Args:
        module: The module, with real parameters on ``device``.
        described: Its blocks; kinds are those of a specification, or found here for a map. Match the result to a
            specification made otherwise by :func:`attach_seconds`.
        batch_for_rows: Makes a batch of so many rows, on ``device``.
        call: Runs the user's step on a batch and returns what it returns.
        progress: Told a text and a fraction in [0, 1].
        budget_seconds: How long to measure, though not less than one warm-up and one round over all sizes.
        most_calls: How often the step may be called on real numbers, if not as often as there is time for; twice per
            size at least.

    Raises:
        TraceError: If the step fails or returns no loss.
    """
    module_map = described.module_map if isinstance(described, ModelSpec) else described
    sizes = tuple(sorted(set(rows)))
    if not sizes:
        raise ValueError("rows is empty: at least one size is needed to measure")
    batches = {size: batch_for_rows(size) for size in sizes}
    blocks = tuple(module.get_submodule(name) for name in module_map.blocks)
    kinds = _kinds(module, module_map, blocks, call, batches[sizes[0]])
    with isolated(module):
        substitute_parameters(module, None, {})
        step = partial(_timed_step, blocks, kinds.twins(), call, device)
        try:
            samples = _measure(step, batches, budget_seconds, progress, most_calls)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(f"the step failed while it was timed: {type(error).__name__}: {error}") from error
    parts: list[tuple[str, int, tuple[int, ...]]] = [("head", 0, ())]
    for index, label in enumerate(kinds.labels):
        parts.append((label, kinds.examples[index] + 1, kinds.members(index)))
    parts.append(("tail", len(blocks) + 1, ()))
    return tuple(_layer_seconds(samples, sizes, kind, part, layers) for kind, part, layers in parts)


def measured_sizes(rows: int) -> list[int]:
    """Which microbatches of a batch of so many rows to measure: its smallest and largest parts and two between."""
    parts = [size for size in range(1, rows + 1) if rows % size == 0]
    return sorted({parts[round(number * (len(parts) - 1) / 3)] for number in range(4)})


def attach_seconds(spec: ModelSpec, seconds: Sequence[LayerSeconds], update_seconds_per_byte: float = 0.0) -> ModelSpec:
    """A specification with measured seconds, each of its kinds having those of the kind that its layers were timed in.

    Args:
        spec: The specification; it may tell more kinds apart than the measurement did.
        seconds: What :func:`time_layers` measured for the same module.
        update_seconds_per_byte: What :func:`~lightning_mist.model.layer_timing.time_update` measured of the
            optimizer.
    """
    # Measured per byte of what is updated, which masters have more of than parameters.
    update = spec.optimizer.gradient_bytes_per_parameter_byte * update_seconds_per_byte
    spec = replace(spec, optimizer=replace(spec.optimizer, step_seconds_per_parameter_byte=update))
    if not seconds:
        return replace(spec, seconds=())
    by_name = {item.kind: item for item in seconds}
    matched = [by_name["head"]]
    for index, layer in enumerate(spec.layers):
        position = spec.kinds.index(index)
        item = next((item for item in seconds if position in item.layers), None)
        if item is None:
            raise TraceError(f"layer {position} ({layer.kind}) was not timed: the seconds belong to another module")
        matched.append(replace(item, kind=layer.kind, layers=tuple(i for i, k in enumerate(spec.kinds) if k == index)))
    return replace(spec, seconds=(*matched, by_name["tail"]))


# Seconds of the optimizer's step, measured on copies of the parameters with the user's own optimizer and settings.
#
# On a CPU a step's seconds over its bytes are what a byte takes. On a device part of them is the host's, launching a
# step that is over before the next one is launched, and does not grow with the parameters: two sizes are timed there,
# and what a byte takes is the difference.

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
    for given in optimizer.param_groups:
        parameters = []
        for parameter in given["params"]:
            size = parameter.numel() * (dtype or parameter.dtype).itemsize
            if not parameter.requires_grad or (total and total + size > largest_bytes):
                continue
            parameters.append(_copy(parameter, device, largest_bytes, dtype or parameter.dtype))
            total += parameters[-1].numel() * parameters[-1].element_size()
        if parameters:
            # Some optimizers keep scratch space in their groups, which is the user's.
            settings = deepcopy({name: value for name, value in given.items() if name != "params"})
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
