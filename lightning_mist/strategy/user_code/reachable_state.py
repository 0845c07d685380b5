"""What the user's code can reach besides its batch, at a glance: cheap enough to look at before and after every step.

Two looks tell whether something has changed in between. Looks of several ranks at the same time tell whether code that
runs on one rank for another would see the same there.
"""

import hashlib
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.devices import read
from lightning_mist.model.user_code import SIMPLE, Reach, Replayed, Space, is_iterator, is_users_object

_ITEMS = 32
"""Entries of a container that are looked at."""

_BYTES = 1 << 16
"""Bytes of an array that are looked at."""

_DEPTH = 2


class Survey:
    """Looks at what code can reach.

    Args:
        without: Objects whose attributes are not looked at.
        beside: Gives more values to look at, by name.
    """

    def __init__(
        self, reach: Reach, without: Iterable[Any] = (), beside: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self._reach, self._beside = reach, beside or dict
        self._without = {id(vars(item)) for item in without}
        self._sums: dict[int, tuple[int, Tensor, int]] = {}

    def look(self) -> dict[str, Hashable]:
        """Something for each name that is equal as long as the value has not changed."""
        return {key: _token(value, _DEPTH) for key, value in (*self._values(), *self._beside().items())}

    def details(self) -> dict[str, int]:
        """A number for each name whose values can be compared between processes."""
        found = {}
        for key, value in self._values():
            portable = self._portable(value, _DEPTH)
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
                if not isinstance(value, (type, nn.Module, property)) and not hasattr(value, "__get__"):
                    yield _key(space, name), value

    def _portable(self, value: Any, depth: int) -> Hashable:
        """What can be compared of a value; ``None`` if nothing."""
        if isinstance(value, SIMPLE):
            return type(value).__name__, repr(value)
        if isinstance(value, Tensor):
            return None if isinstance(value, nn.Parameter) or value.is_meta else self._sum(value)
        if depth == 0:
            return None
        if isinstance(value, (list, tuple, deque)):
            return len(value), tuple(self._portable(item, depth - 1) for item in list(value)[:_ITEMS])
        entries = value if isinstance(value, dict) else vars(value) if is_users_object(value) else None
        if entries is not None:
            names = sorted(name for name in entries if isinstance(name, str) and name in self._reach.names)
            return tuple((name, self._portable(entries[name], depth - 1)) for name in names[:_ITEMS])
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


def _key(space: Space, name: str) -> str:
    return f"the attribute {name} of {space.label}" if space.is_module else f"{name} ({space.label})"


def _digest(value: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big")


def _token(value: Any, depth: int) -> Hashable:
    """Something that is equal as long as the value has not changed."""
    if isinstance(value, SIMPLE):
        return value if value == value else "not a number"  # noqa: PLR0124
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    drawn = _drawn(value)
    if drawn is None and depth:
        drawn = _inside(value, depth)
    return id(value), drawn


def _drawn(value: Any) -> Hashable:
    """How far something that is drawn from has come; ``None`` for anything else."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if is_iterator(value) or isinstance(value, Replayed):
        return _position(value)
    return _array(value)


def _inside(value: Any, depth: int) -> Hashable:
    """What a container or an object of the user's holds; ``None`` for anything else."""
    if isinstance(value, (tuple, list, deque)):
        last = [value[-1 - number] for number in range(min(len(value), _ITEMS))]
        return len(value), tuple(_token(item, depth - 1) for item in last)
    if isinstance(value, dict):
        pairs = zip(value.items(), range(_ITEMS), strict=False)
        return len(value), tuple((_name(key), _token(item, depth - 1)) for (key, item), _ in pairs)
    if isinstance(value, set):
        return len(value)
    return _inside(vars(value), depth) if is_users_object(value) else None


def _name(key: Any) -> Hashable:
    return key if isinstance(key, SIMPLE) else id(key)


def _array(value: Any) -> Hashable:
    """What tells numpy's arrays and generators apart; ``None`` for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        part = value if value.nbytes <= _BYTES else value.reshape(-1)[: _BYTES // value.itemsize]
        return value.shape, hashlib.blake2b(part.tobytes(), digest_size=8).hexdigest()
    return None


def _position(iterator: Any) -> Hashable:
    """Where an iterator stands, as far as it shows."""
    if isinstance(iterator, Replayed):
        return iterator.position, _position(iterator.inner)
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        inner = [_position(item) for item in frame.f_locals.values() if is_iterator(item)]
        return frame.f_lasti, repr([item for item in frame.f_locals.values() if isinstance(item, SIMPLE)]), tuple(inner)
    left = operator.length_hint(iterator, -1)
    return left if left >= 0 else repr(iterator)
