"""What a batch looks like, without its values: equal signatures let a step take the same path."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DEPTH = 16
"""Nesting beyond which an object is told apart by its type only; guards against objects that contain themselves."""


def batch_signature(value: Any) -> Hashable:
    """Shapes and dtypes of a batch's tensors, its structure, and the plain values that may steer a step.

    Integers, booleans and names of entries count with their values, since shapes may follow from them; a text counts
    unless it is one of a list (data); a float counts with its type only.
    """
    return _signature(value, depth=0, is_item=False)


def _signature(value: Any, *, depth: int, is_item: bool) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device.type
    if value is None or isinstance(value, (bool, int, torch.Size)) or (isinstance(value, (str, bytes)) and not is_item):
        return type(value), value
    kind: Any = type(value)
    if isinstance(value, (str, bytes)) or depth == _DEPTH:
        return kind  # type: ignore[no-any-return]
    if isinstance(value, Mapping):
        return type(value), tuple((str(k), _signature(v, depth=depth + 1, is_item=False)) for k, v in value.items())
    if isinstance(value, Sequence):
        return type(value), tuple(_signature(item, depth=depth + 1, is_item=True) for item in value)
    fields = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    fields |= getattr(value, "__dict__", {})
    return type(value), tuple((str(k), _signature(v, depth=depth + 1, is_item=False)) for k, v in fields.items())
