"""Values that code may change: frozen so that a change shows, and put back as they were.

Covers containers (nested up to a depth), objects of the user's own classes, tensors, arrays, random generators and
iterators. What an iterator has given can be had again, so that trying a step takes nothing from it.
"""

import collections
import copy
import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

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

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Thread)

_CONTAINERS = (dict, list, set, collections.deque)
SIMPLE = (type(None), bool, int, float, complex, str, bytes)


class Replayed:
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

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
        self._tensors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._resets: dict[int, tuple[Any, Callable[[], Any]]] = {}

    def restore(self) -> None:
        """Put everything that was frozen or kept back as it was."""
        for container, contents in self._copies.values():
            _refill(container, contents)
        for _, reset in self._resets.values():
            reset()
        with torch.no_grad():
            for tensor, memory, contents in self._tensors.values():
                if tensor.device != memory.device or address_of(tensor) != address_of(memory):
                    tensor.data = memory
                tensor.copy_(contents)

    def keep_container(self, value: Any) -> None:
        """Remember what is in a container, but nothing of its items."""
        if id(value) not in self._copies:
            self._copies[id(value)] = (value, copy.copy(value))

    def keep_tensor(self, tensor: Tensor) -> None:
        """Remember the contents of a tensor, if tensors are kept."""
        if not self._with_tensors or isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return
        if self._largest is None or tensor.numel() * tensor.element_size() <= self._largest:
            self._tensors.setdefault(id(tensor), (tensor, tensor.detach(), tensor.detach().clone()))

    def freeze(self, value: Any, depth: int = DEPTH) -> Any:
        """Something that compares equal as long as the value has not changed."""
        if isinstance(value, SIMPLE):
            return type(value), repr(value)
        state = self._drawn(value) or self._array(value)
        if state is None and depth and not isinstance(value, nn.Module):
            state = self._inside(value, depth)
        return ("object", id(value)) if state is None else state

    def _inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth)
        if isinstance(value, tuple):
            return tuple, tuple(self.freeze(item, depth - 1) for item in value)
        if not is_users_object(value):
            return None
        # What threads share, such as a queue, goes on meanwhile: it is looked at, and not put back under their hands.
        is_shared = any(isinstance(item, _LOCKS) for item in vars(value).values())
        keeper = Contents(with_tensors=False) if is_shared else self
        return "object", id(value), keeper.freeze(vars(value), depth - 1)

    def _drawn(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        state: Any = None
        if isinstance(value, Replayed):
            state = value.given
            self._reset(value, partial(value.rewind, state))
        elif isinstance(value, torch.Generator):
            torch_state = value.get_state()
            state = bytes(torch_state.numpy())
            self._reset(value, partial(value.set_state, torch_state))
        elif isinstance(value, random.Random):
            state = value.getstate()
            self._reset(value, partial(value.setstate, state))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator.state
            state = repr(bits)
            self._reset(value, partial(setattr, value.bit_generator, "state", bits))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            drawn = value.get_state()
            state = repr(drawn)
            self._reset(value, partial(value.set_state, drawn))
        return None if state is None else ("drawn", id(value), state)

    def _array(self, value: Any) -> Any:
        """What is in a tensor or an array; ``None`` for anything else."""
        if isinstance(value, Tensor):
            self.keep_tensor(value)
            return "tensor", id(value), -1 if value.is_inference() else value._version
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, numpy.ndarray) or value.nbytes > MOST_BYTES or value.dtype.hasobject:
            return None
        if value.flags.writeable and self._with_tensors:
            self._reset(value, partial(numpy.copyto, value, value.copy()))
        return "array", id(value), value.shape, hash(value.tobytes())

    def _reset(self, value: Any, reset: Callable[[], Any]) -> None:
        self._resets.setdefault(id(value), (value, reset))

    def _container(self, value: Any, depth: int) -> Any:
        self.keep_container(value)
        if len(value) > _MOST_ITEMS:
            return type(value), id(value), len(value)
        is_keyed = isinstance(value, (dict, set))
        keys = tuple(key if isinstance(key, SIMPLE) else id(key) for key in value) if is_keyed else ()
        items = value.values() if isinstance(value, dict) else () if isinstance(value, set) else value
        return type(value), id(value), keys, tuple(self.freeze(item, depth - 1) for item in items)


def address_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's values are; of one without memory of its own (a fake one, say) only its form."""
    has_memory = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.layout is torch.strided
    return tensor.data_ptr() if has_memory else None, tensor.dtype, tuple(tensor.shape)


def is_users_object(value: Any) -> bool:
    """Whether something is an instance of a class of the user's, whose attributes may change."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, FunctionType, nn.Module))
        and type(value).__module__.partition(".")[0] not in FOREIGN_PACKAGES
        and not isinstance(value, type(sys))
    )


def is_iterator(value: Any) -> bool:
    """Whether something can be asked for its next item and keeps its position where nobody sees it."""
    return hasattr(type(value), "__next__") and not isinstance(value, Replayed) and not is_users_object(value)


def held_iterators(holder: Any, names: Iterator[Any], depth: int = 2) -> Iterator[tuple[Any, Any]]:
    """The dictionaries and lists that hold iterators, and under which key, down to a depth."""
    for name in names:
        value = holder[name]
        if is_iterator(value):
            yield holder, name
        elif depth and isinstance(value, (dict, list)) and len(value) <= _MOST_ITEMS:
            keys = iter(list(value)) if isinstance(value, dict) else iter(range(len(value)))
            yield from held_iterators(value, keys, depth - 1)
        elif depth and is_users_object(value):
            space = vars(value)
            yield from held_iterators(space, iter(list(space)), depth - 1)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        if container.keys() != contents.keys() or any(container[k] is not v for k, v in contents.items()):
            container.clear()
            container.update(contents)
    elif isinstance(container, set):
        if container != contents:
            container.clear()
            container.update(contents)
    elif len(container) != len(contents) or any(a is not b for a, b in zip(container, contents, strict=True)):
        container.clear()
        container.extend(contents)
