"""Plans that were made before: the same script asks once.

A plan is kept by everything that it follows from and that is known before anything is measured or tried: the network,
its code, the batch, the optimizer, the machine, the options and the versions of what computes.
"""

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_mist.errors import PlanError
from lightning_mist.plan import Fingerprint, Plan, differences, load, save

FOLDER = "plans"

_STEP = 1.25
"""Sizes within a factor of this count as one: lengths of sequences differ from one shuffled epoch to the next."""

_PACKAGES = ("lightning-mist", "torch", "numpy", "highspy")


def cache_key(module: nn.Module, batch: Any, optimizers: Iterable[Any], others: Iterable[Any]) -> str:
    """What a plan is kept by; ``others`` are whatever else it follows from, told apart by their ``repr``."""
    told = sha256()
    for line in _lines(module, batch, optimizers, others):
        told.update(line.encode() + b"\0")
    return told.hexdigest()[:32]


def _lines(module: nn.Module, batch: Any, optimizers: Iterable[Any], others: Iterable[Any]) -> Iterator[str]:
    classes: dict[type, None] = {}
    for name, child in module.named_modules():
        yield f"{name} {type(child).__module__}.{type(child).__qualname__} {child.extra_repr()} {child.training}"
        classes.update(dict.fromkeys(type(child).__mro__))
    for cls in classes:
        if cls.__module__.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning", "builtins"):
            yield _source(cls)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {tensor.device.type}"
    yield repr(_sizes(batch))
    for optimizer in optimizers:
        yield f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        for group in optimizer.param_groups:
            # Learning rates do not count: schedules change them.
            yield repr(
                [(k, len(v) if k == "params" else v if isinstance(v, bool) else type(v)) for k, v in group.items()]
            )
    yield from map(repr, others)
    for package in _PACKAGES:
        yield f"{package} {version(package)}"


def _source(cls: type) -> str:
    """A class's code, or where it cannot be read its name."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


def _sizes(value: Any) -> Any:
    """A batch's structure and types, its rows exactly, and its other sizes roughly."""
    if isinstance(value, Tensor):
        # Nested ones have no shape in numbers.
        rows, *sizes = (value.size(0), value.numel()) if value.is_nested else (value.shape or (1,))
        return value.dtype, rows, tuple(round(math.log(max(size, 1), _STEP)) for size in sizes)
    if isinstance(value, dict):
        return tuple((str(name), _sizes(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(_sizes(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return tuple((field.name, _sizes(getattr(value, field.name))) for field in fields(value))
    return type(value).__name__


def cache_path(directory: Path, key: str) -> Path:
    """Where a plan is kept."""
    return directory / FOLDER / f"{key}.json"


def cached_plan(path: Path, present: Fingerprint) -> tuple[Plan | None, str | None]:
    """A plan that was kept, or None; and why one that is there cannot be used, or None.

    Args:
        present: Of what it must have been made for.
    """
    if not path.exists():
        return None, None
    try:
        plan = load(path)
        differing = differences(Fingerprint.from_pairs(plan.fingerprint), present)
    except (OSError, PlanError, ValueError) as error:
        return None, f"the plan kept in {path} is not used: {error}"
    if (plan.world_size, plan.num_layers) != (present.world_size, present.num_layers):
        differing += (f"it is for {plan.world_size} devices and {plan.num_layers} layers",)
    return (None, f"the plan kept in {path} is not used: {differing[0]}") if differing else (plan, None)


def remembered_limit(path: Path) -> int | None:
    """The ``memory_limit`` to plan with where the plan kept at a path ran out of memory; None if it did not."""
    try:
        limit = int(path.with_suffix(".limit").read_text())
    except (OSError, ValueError):
        return None
    return limit if limit > 0 else None


def remember_limit(path: Path, limit: int) -> None:
    """Plan with less memory from now on: the plan kept at a path, or to be kept there, ran out of it (OSError)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".limit").write_text(str(limit))
    path.unlink(missing_ok=True)


def cache_plan(plan: Plan, path: Path) -> str | None:
    """Keep a plan for the next time; why it could not be kept, or None."""
    try:
        write_plan(plan, path)
    except OSError as error:
        return f"the plan is not kept for later runs: {error}"
    return None


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan, and the folders that are to hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(plan, path)
