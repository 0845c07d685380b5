"""Values that code may change: frozen so that a change shows, and put back as they were.

Covers containers (nested up to a depth), objects of the user's own classes, tensors, arrays, random generators and
iterators. What an iterator has given can be had again, so that trying a step takes nothing from it.
"""

import collections
import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn

from lightning_mist.attributes import StandIn, container, entries, is_a, of_class, own, package_of, size

DEPTH = 4
"""How deep containers and objects are looked into."""

_MOST_ITEMS = 10_000
"""Containers with more items are told apart by their length only: a vocabulary is not state of a step."""

MOST_BYTES = 1 << 26
"""Arrays of more bytes are compared by identity only."""

FOREIGN_PACKAGES = (
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "numpy", "builtins",
    "lightning_mist", "logging", "threading", "pandas",
)  # fmt: skip
"""Packages whose objects are compared by identity only: they refer to the whole world (the trainer, for example)."""

_SHARED = (threading.Condition, threading.Semaphore, threading.Thread)
"""What an object has that threads hand things on by; a lock alone may guard what the step itself counts."""

_CONTAINERS = (dict, list, set, collections.deque)
_SIMPLE: tuple[Any, ...] = (type(None), bool, int, float, complex, str, bytes)


class Replayed(StandIn):
    """An iterator whose items can be had again, until it is released."""

    def __init__(self, inner: Any) -> None:
        self.inner, self._items, self._keeps = inner, collections.deque[Any](), True
        self.given = 0

    @property
    def position(self) -> tuple[int, int]:
        """Something that differs after every item."""
        return self.given, len(self._items)

    def __iter__(self) -> "Replayed":
        return self

    def __next__(self) -> Any:
        if not self._keeps:
            return self._items.popleft() if self._items else next(self.inner)
        if self.given == len(self._items):
            self._items.append(next(self.inner))
        self.given += 1
        return self._items[self.given - 1]

    def rewind(self, given: int = 0) -> None:
        """Give items again from a position on."""
        self.given = given

    def release(self) -> Any:
        """What stands in the iterator's place from now on: itself if nothing was taken from it."""
        self._keeps, self.given = False, 0
        return self if self._items else self.inner


class Contents:
    """Values at one time; tensors of up to ``largest`` bytes are copied, all if None."""

    def __init__(self, *, with_tensors: bool, largest: int | None = None) -> None:
        self._with_tensors, self._largest = with_tensors, largest
        self._resets: dict[int, tuple[Any, Callable[[], Any]]] = {}

    def restore(self) -> None:
        """Put everything that was frozen or kept back as it was."""
        with torch.no_grad():
            for _, reset in self._resets.values():
                reset()

    def keep_container(self, value: Any) -> None:
        """Remember what is in a container, but nothing of its items."""
        if id(value) not in self._resets:
            self._reset(value, partial(_refill, value, list(entries(value))))

    def keep_tensor(self, tensor: Tensor) -> None:
        """Remember the contents of a tensor, if tensors are kept."""
        if not self._with_tensors or isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return
        if self._largest is None or tensor.numel() * tensor.element_size() <= self._largest:
            self._reset(tensor, partial(_rewrite, tensor, tensor.detach(), tensor.detach().clone()))

    def freeze(self, value: Any, depth: int = DEPTH) -> Any:
        """Something that compares equal as long as the value has not changed."""
        if (known := simple(value)) is not None:
            return known
        try:
            state = self._drawn(value) or self._array(value)
        except Exception:  # what a class of the user's makes of a generator or an array
            state = None
        if state is None and depth and not is_a(value, nn.Module):
            state = self._inside(value, depth)
        return ("object", id(value)) if state is None else state

    def _inside(self, value: Any, depth: int) -> Any:
        if is_a(value, _CONTAINERS):
            return self._container(value, depth)
        if is_a(value, tuple):
            return tuple, tuple(self.freeze(item, depth - 1) for _, item in entries(value))
        if not is_users_object(value):
            return None
        # What threads share, such as a queue, goes on meanwhile: it is looked at, and not put back under their hands.
        attributes = own(value)
        is_shared = any(is_a(item, _SHARED) for item in attributes.values())
        keeper = Contents(with_tensors=False) if is_shared else self
        return "object", id(value), keeper.freeze(attributes, depth - 1)

    def _drawn(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        state: Any = None
        if is_a(value, Replayed):
            state = value.given
            self._reset(value, partial(value.rewind, state))
        elif is_a(value, torch.Generator):
            torch_state = value.get_state()
            state = bytes(torch_state.numpy())
            self._reset(value, partial(value.set_state, torch_state))
        elif is_a(value, random.Random):
            state = value.getstate()
            self._reset(value, partial(value.setstate, state))
        elif numpy is not None and is_a(value, numpy.random.Generator):
            bits = value.bit_generator.state
            state = repr(bits)
            self._reset(value, partial(setattr, value.bit_generator, "state", bits))
        elif numpy is not None and is_a(value, numpy.random.RandomState):
            drawn = value.get_state()
            state = repr(drawn)
            self._reset(value, partial(value.set_state, drawn))
        return None if state is None else ("drawn", id(value), state)

    def _array(self, value: Any) -> Any:
        """What is in a tensor or an array; ``None`` for anything else."""
        if is_a(value, Tensor):
            self.keep_tensor(value)
            return "tensor", id(value), -1 if value.is_inference() else value._version
        numpy = sys.modules.get("numpy")
        if numpy is None or not is_a(value, numpy.ndarray) or value.nbytes > MOST_BYTES or value.dtype.hasobject:
            return None
        if value.flags.writeable and self._with_tensors:
            self._reset(value, partial(numpy.copyto, value, value.copy()))
        return "array", id(value), value.shape, hash(value.tobytes())

    def _reset(self, value: Any, reset: Callable[[], Any]) -> None:
        self._resets.setdefault(id(value), (value, reset))

    def _container(self, value: Any, depth: int) -> Any:
        self.keep_container(value)
        if size(value) > _MOST_ITEMS:
            return id(value), size(value)
        if is_a(value, set):
            return id(value), tuple(token(item) for _, item in entries(value))
        return id(value), tuple((token(key), self.freeze(item, depth - 1)) for key, item in entries(value))


def address_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's values are; of one without memory of its own (a fake one, say) only its form."""
    has_memory = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.layout is torch.strided
    return tensor.data_ptr() if has_memory else None, tensor.dtype, tuple(tensor.shape)


def simple(value: Any) -> tuple[str, Any] | None:
    """The class and the text of a plain value, such as a number, whatever its class makes of it; None of any other."""
    kind = next((kind for kind in _SIMPLE if is_a(value, kind)), None)
    if kind is None:
        return None
    return type(value).__name__, value if type(value) in (str, bytes) else kind.__repr__(value)


def token(value: Any) -> Any:
    """What tells one plain value, such as a number, from another; of anything else which one it is."""
    return id(value) if (known := simple(value)) is None else known


def is_code(value: Any) -> bool:
    """Whether something is a class, a module of torch, or what classes make methods and properties of."""
    return is_a(value, (type, nn.Module)) or of_class(value, "__get__") is not None


def is_users_object(value: Any) -> bool:
    """Whether something is an instance of a class of the user's, whose attributes may change."""
    return (
        not is_a(value, (type, FunctionType, nn.Module, ModuleType))
        and package_of(type(value)) not in FOREIGN_PACKAGES
        and own(value) is not None
    )


def is_iterator(value: Any) -> bool:
    """Whether something can be asked for its next item and keeps its position where nobody sees it."""
    is_one = not is_a(value, (type, *ProxyTypes)) and of_class(value, "__next__") is not None
    return is_one and not is_a(value, Replayed) and not is_users_object(value)


def held_iterators(holder: Any, names: Iterator[Any], depth: int = 2) -> Iterator[tuple[Any, Any]]:
    """The dictionaries and lists that hold iterators, and under which key, down to a depth."""
    for name in names:
        value = container(holder).__getitem__(holder, name)
        if is_iterator(value):
            yield holder, name
        elif depth and is_a(value, (dict, list)) and size(value) <= _MOST_ITEMS:
            yield from held_iterators(value, iter([key for key, _ in entries(value)]), depth - 1)
        elif depth and is_users_object(value):
            yield from held_iterators(own(value), iter([key for key, _ in entries(own(value))]), depth - 1)


def _rewrite(tensor: Tensor, memory: Tensor, contents: Tensor) -> None:
    if tensor.device != memory.device or address_of(tensor) != address_of(memory):
        tensor.data = memory
    tensor.copy_(contents)


def _refill(value: Any, contents: list[tuple[Any, Any]]) -> None:
    kind, now = container(value), list(entries(value))
    is_keyed = issubclass(kind, dict)
    if [(is_keyed and id(key), id(item)) for key, item in now] != [(is_keyed and id(k), id(v)) for k, v in contents]:
        kind.clear(value)
        for key, item in contents:
            if is_keyed:
                kind.__setitem__(value, key, item)
            else:
                (kind.add if issubclass(kind, set) else kind.append)(value, item)
