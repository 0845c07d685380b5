"""What the user's code can reach besides its batch, at a glance: cheap enough to look at before and after every step.

Two looks tell whether something has changed in between. Looks of several ranks at the same time tell whether code that
runs on one rank for another would see the same there.
"""

import hashlib
import operator
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_mist.attributes import container, entries, is_a, own, size
from lightning_mist.devices import read
from lightning_mist.model.user_code import (
    NameSpace,
    Reach,
    Replayed,
    is_code,
    is_iterator,
    is_users_object,
    simple,
    token,
)

_ITEMS = 32
"""Entries of a container that are looked at."""

_BYTES = 1 << 16
"""Bytes of an array that are looked at."""

_DEPTH = 2

_PLACES = frozenset(("_parameters", "_flat_weights"))
"""Where modules keep parameters: stages put others there while they run, and see to it that none is replaced."""


class Survey:
    """Looks at what code can reach, but for attributes of some objects, and at values that ``beside`` gives by name."""

    def __init__(
        self, reach: Reach, without: Iterable[Any] = (), beside: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self._reach, self._beside = reach, beside or dict
        self._without = {id(own(item)) for item in without}
        self._sums: dict[int, tuple[int, Tensor, int]] = {}

    def look(self) -> dict[str, Hashable]:
        """Something for each name that is equal as long as the value has not changed."""
        return {key: _token(value, _DEPTH) for key, value in (*self._values(), *self._beside().items())}

    def details(self) -> dict[str, int]:
        """A number for each name whose values can be compared between processes."""
        found = {}
        for key, value in self._values():
            try:
                portable = self._portable(value, _DEPTH)
            except Exception:  # what a class of the user's makes of a tensor or an array
                continue
            if portable is not None:
                found[key] = _digest(portable)
        return found

    def digest(self) -> int:
        """One number that differs where :meth:`details` do."""
        return _digest(tuple(sorted(self.details().items())))

    def _values(self) -> Iterator[tuple[str, Any]]:
        for space in self._reach.spaces:
            if id(space.holder) in self._without:
                continue
            for name, value in self._reach.named(space):
                if not (is_code(value) or (space.is_module and name in _PLACES)):
                    yield _key(space, name), value

    def _portable(self, value: Any, depth: int) -> Hashable:
        """What can be compared of a value; ``None`` if nothing."""
        if (known := simple(value)) is not None:
            return known
        if is_a(value, Tensor):
            return None if is_a(value, nn.Parameter) or value.is_meta else self._sum(value)
        if depth == 0:
            return None
        if is_a(value, (list, tuple, deque)):
            items = (item for _, item in islice(entries(value), _ITEMS))
            return size(value), tuple(self._portable(item, depth - 1) for item in items)
        named = value if is_a(value, dict) else own(value) if is_users_object(value) else None
        if named is not None:
            found = {name: item for name, item in entries(named) if type(name) is str and name in self._reach.names}
            return tuple((name, self._portable(found[name], depth - 1)) for name in sorted(found)[:_ITEMS])
        return _array(value)

    def _sum(self, tensor: Tensor) -> Hashable:
        """The sum of a tensor's entries, worked out again only when it was written to or replaced."""
        version = 0 if tensor.is_inference() else tensor._version
        known = self._sums.get(id(tensor))
        if known is None or known[0] != version or known[1] is not tensor:
            with torch.no_grad():
                total = read(tensor.detach().double().sum()) if not tensor.is_complex() and tensor.numel() else 0.0
            if len(self._sums) > 1000:
                self._sums.clear()
            known = self._sums[id(tensor)] = (version, tensor, _digest((tuple(tensor.shape), repr(total))))
        return known[2]


def changed(before: dict[str, Hashable], after: dict[str, Hashable]) -> list[str]:
    """The names that differ between two looks."""
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def unlike(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of which ranks have different details."""
    names = {name for one in found for name in one}
    return sorted(name for name in names if any(one.get(name) != found[0].get(name) for one in found))


def _key(space: NameSpace, name: str) -> str:
    return f"the attribute {name} of {space.label}" if space.is_module else f"{name} ({space.label})"


def _digest(value: Hashable) -> int:
    """A number that tells one value from another, which fits a tensor of whole numbers."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _token(value: Any, depth: int) -> Hashable:
    """Something that is equal as long as the value has not changed."""
    if (known := simple(value)) is not None:
        return known
    if is_a(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    try:
        drawn = _drawn(value)
    except Exception:  # what a class of the user's makes of a generator, an array or an iterator
        drawn = None
    if drawn is None and depth:
        drawn = _inside(value, depth)
    return id(value), drawn


def _drawn(value: Any) -> Hashable:
    """How far something that is drawn from has come; ``None`` for anything else."""
    if is_a(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if is_a(value, random.Random):
        return hash(value.getstate())
    if is_iterator(value) or is_a(value, Replayed):
        return _position(value)
    return _array(value)


def _inside(value: Any, depth: int) -> Hashable:
    """What a container or an object of the user's holds; ``None`` for anything else."""
    if is_a(value, (tuple, list, deque)):
        kind = container(value)
        last = [kind.__getitem__(value, -1 - number) for number in range(min(size(value), _ITEMS))]
        return size(value), tuple(_token(item, depth - 1) for item in last)
    if is_a(value, dict):
        return size(value), tuple((token(k), _token(item, depth - 1)) for k, item in islice(entries(value), _ITEMS))
    if is_a(value, set):
        return size(value)
    return _inside(own(value), depth) if is_users_object(value) else None


def _array(value: Any) -> Hashable:
    """What tells numpy's arrays and generators apart; ``None`` for anything else."""
    if is_a(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if is_a(value, np.random.RandomState):
        return repr(value.get_state())
    if is_a(value, np.ndarray) and not value.dtype.hasobject:
        part = value if value.nbytes <= _BYTES else value.reshape(-1)[: _BYTES // value.itemsize]
        return value.shape, hashlib.blake2b(part.tobytes(), digest_size=8).hexdigest()
    return None


def _position(iterator: Any) -> Hashable:
    """Where an iterator stands, as far as it shows."""
    if is_a(iterator, Replayed):
        return iterator.position, _position(iterator.inner)
    frame = iterator.gi_frame if type(iterator) is GeneratorType else None
    if frame is not None:
        inner = [_position(item) for item in frame.f_locals.values() if is_iterator(item)]
        return frame.f_lasti, repr([simple(item) for item in frame.f_locals.values()]), tuple(inner)
    left = operator.length_hint(iterator, -1)
    return left if left >= 0 else repr(iterator)
