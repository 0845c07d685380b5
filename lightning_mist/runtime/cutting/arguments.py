"""Looking into the arguments of calls of torch functions."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def first_slice(index: Any) -> tuple[Any, Any] | None:
    """From where to where an indexing takes a tensor's first dimension, step by step; None if it does not."""
    first = index[0] if isinstance(index, tuple) and index else index
    return (first.start, first.stop) if isinstance(first, slice) and first.step in (None, 1) else None


def takes_all(ends: tuple[Any, Any], rows: int) -> bool:
    """Whether a slice by numbers leaves none of so many rows out; what is no number may be theirs."""
    first, end = ends
    return first in (None, 0) and (type(end) is not int or end >= rows)


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
