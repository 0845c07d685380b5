"""Looking into the arguments of calls of torch functions."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def is_writing(name: str) -> bool:
    """Whether a function writes into its first argument."""
    return name in ("__setitem__",) or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def items_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The members of an argument that may hold tensors, with how to reach them; empty for a leaf."""
    if isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, slice):
        yield from (("start", value.start), ("stop", value.stop), ("step", value.step))


def leaves_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All leaves of an argument, with their paths."""
    is_leaf = True
    for key, item in items_of(value):
        is_leaf = False
        yield from leaves_in(item, (*path, key))
    if is_leaf:
        yield path, value


def rebuilt(value: Any, replace: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """An argument with other leaves."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuilt(item, replace, (*path, key)) for key, item in enumerate(value)))
    if isinstance(value, (tuple, list)) and value:
        items = [rebuilt(item, replace, (*path, key)) for key, item in enumerate(value)]
        if isinstance(value, torch.Size) and not all(isinstance(item, int) for item in items):
            return tuple(items)
        return type(value)(items)
    if isinstance(value, dict) and value:
        return {key: rebuilt(item, replace, (*path, key)) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(rebuilt(item, replace, (*path, key)) for key, item in items_of(value)))
    return replace(path, value)
