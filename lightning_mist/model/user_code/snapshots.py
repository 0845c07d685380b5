"""What a step may change beside parameters, and what trying it finds: remembered, compared, put back.

On its module: the attributes of it and its submodules, containers in them (nested up to a depth), objects of the user's
own classes, the contents of buffers. Beside it: counters on classes, globals, closures, the trainer and its callbacks,
arrays, random generators and iterators. What an iterator has given can be had again, so that trying a step takes
nothing from it.
"""

import collections
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from torch import Tensor, nn

from lightning_mist.attributes import StandIn, container, entries, is_a, of_class, own, package_of, size
from lightning_mist.devices import used_generators
from lightning_mist.model.user_code.reach import NameSpace, Reach, is_users_object

# Single values ----------------------------------------------------------------------------------------------------

DEPTH = 4
"""How deep containers and objects are looked into."""

_MOST_ITEMS = 10_000
"""Containers with more items are told apart by their length only: a vocabulary is not state of a step."""

MOST_BYTES = 1 << 26
"""Arrays of more bytes are compared by identity only."""

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
        elif is_a(value, np.random.Generator):
            bits = value.bit_generator.state
            state = repr(bits)
            self._reset(value, partial(setattr, value.bit_generator, "state", bits))
        elif is_a(value, np.random.RandomState):
            drawn = value.get_state()
            state = repr(drawn)
            self._reset(value, partial(value.set_state, drawn))
        return None if state is None else ("drawn", id(value), state)

    def _array(self, value: Any) -> Any:
        """What is in a tensor or an array; ``None`` for anything else."""
        if is_a(value, Tensor):
            self.keep_tensor(value)
            return "tensor", id(value), -1 if value.is_inference() else value._version
        if not is_a(value, np.ndarray) or value.nbytes > MOST_BYTES or value.dtype.hasobject:
            return None
        if value.flags.writeable and self._with_tensors:
            self._reset(value, partial(np.copyto, value, value.copy()))
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


# What names stand for ---------------------------------------------------------------------------------------------

_Place = tuple[Any, str]  # the key of a space and a name in it


class Snapshot:
    """What names stand for in some places, at one time."""

    def __init__(self, spaces: Mapping[Any, NameSpace], contents: Contents) -> None:
        self._spaces, self._contents = spaces, contents
        self.values = {(key, name): value for key, space in spaces.items() for name, value in self._named(space)}
        self.frozen = {place: self._freeze(place[1], value) for place, value in self.values.items()}

    def _named(self, space: NameSpace) -> list[tuple[str, Any]]:
        """Names and values of a space that count."""
        return list(space.values().items())

    def _freeze(self, name: str, value: Any) -> Any:
        return self._contents.freeze(value)

    def differs(self, later: "Snapshot") -> Iterator[_Place]:
        """Places whose values are others in a later snapshot."""
        for place in {**self.frozen, **later.frozen}:
            if self.frozen.get(place) != later.frozen.get(place):
                yield place

    def restore(self) -> None:
        """Put everything back as it was."""
        for key, space in self._spaces.items():
            for name, _ in self._named(space):
                if (key, name) not in self.values:
                    space.remove(name)
        for (key, name), value in self.values.items():
            held = self._spaces[key].values()
            if name not in held or held[name] is not value:
                self._spaces[key].put(name, value)
        self._contents.restore()


_OWN_DICTIONARIES = frozenset(vars(nn.Module())) - {"training"}
"""nn.Module's own registries; parameters, buffers and submodules are compared as such."""


class ModuleState(Snapshot):
    """The state of a module at one time; places are names of its submodules and of their attributes.

    Args:
        with_contents: Whether to copy buffers and tensors among the attributes, so that :meth:`restore` puts their
            contents back.
    """

    def __init__(self, module: nn.Module, *, with_contents: bool = False) -> None:
        spaces = {name: NameSpace(name, vars(child), is_module=True) for name, child in module.named_modules()}
        super().__init__(spaces, Contents(with_tensors=with_contents))
        for buffer in module.buffers():
            self._contents.keep_tensor(buffer)
        # Setting `.data` leaves the version as it is.
        self._versions = {
            name: (id(b), b._version, b.device, address_of(b))
            for name, b in module.named_buffers(remove_duplicate=False)
        }

    def _freeze(self, name: str, value: Any) -> Any:
        if name not in _OWN_DICTIONARIES:
            return super()._freeze(name, value)
        if isinstance(value, dict):
            self._contents.keep_container(value)
        return None

    def changed_buffers(self, later: "ModuleState") -> Iterator[str]:
        """Names of buffers that were written to or replaced."""
        for name, version in later._versions.items():
            if self._versions.get(name) != version:
                yield name

    def new_tensors(self, later: "ModuleState", kind: type[Tensor]) -> Iterator[_Place]:
        """Places that hold a tensor of a class in a later state and held something else before."""
        for place, value in later.values.items():
            if isinstance(value, kind) and self.values.get(place) is not value:
                yield place


_MOST_DRAWN = 4096
"""How many numbers are looked through for a later state: a loader that begins draws two to four."""


class Generators:
    """The states of the process's random generators: torch's, Python's and numpy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._devices = [(generator, generator.get_state()) for generator in used_generators()]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Continue from these states."""
        torch.set_rng_state(self._torch)
        for generator, state in self._devices:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generators) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        states = [self._torch, *(state for _, state in self._devices)]
        return (*(bytes(state.numpy()) for state in states), self._python, _comparable(self._numpy))

    def follow(self, later: "Generators") -> None:
        """Go on from here to ``later``; from another state, as many numbers of torch's generator further.

        Whoever has drawn in between has drawn others then, and finds no other stream of numbers behind them.
        """
        if self == Generators():
            later.restore()
            return
        counter, number = torch.Generator(), torch.empty((), dtype=torch.int32)  # of 32 bits all numbers are made
        counter.set_state(self._torch)
        for drawn in range(_MOST_DRAWN):
            if torch.equal(counter.get_state(), later._torch):
                for _ in range(drawn):
                    number.random_()
                return
            number.random_(generator=counter)

    def outside_torch(self, later: "Generators") -> Iterator[str]:
        """Names of the generators outside of torch that were drawn from in between."""
        if self._python != later._python:
            yield "Python's random module"
        if _comparable(self._numpy) != _comparable(later._numpy):
            yield "numpy's global generator"


@contextmanager
def same_generators() -> Iterator[None]:
    """Random generators are behind it as before."""
    before = Generators()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def unchanged(module: nn.Module) -> Iterator[ModuleState]:
    """Whatever happens to a module and to random generators inside is undone at the end; gives the state before.

    Covers attributes of every submodule, buffers, hooks, training flags, and parameters put into other slots. What is
    written into parameters stays, and so do gradients, which :func:`~lightning_mist.tensors.gradients_aside` keeps.
    """
    before = ModuleState(module, with_contents=True)
    with same_generators():
        try:
            yield before
        finally:
            before.restore()


def _comparable(state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


# Beside the module -------------------------------------------------------------------------------------------------


class ReachState(Snapshot):
    """Everything that a step can reach, at one time."""

    def __init__(self, reach: Reach, *, is_start: bool) -> None:
        self._reach = reach
        contents = Contents(with_tensors=is_start, largest=MOST_BYTES)
        super().__init__(dict(enumerate(reach.spaces)), contents)

    def _named(self, space: NameSpace) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in self._reach.named(space) if _is_state(value)]


def _is_state(value: Any) -> bool:
    """Whether a value is no code, nor what this package answers with meanwhile, as a recorder of ``log`` or a layer."""
    inner = value.func if is_a(value, partial) else value
    is_ours = is_a(inner, (MethodType, FunctionType)) and package_of(inner) == __name__.partition(".")[0]
    return not (is_code(value) or is_ours)


class Surroundings:
    """What a step that is tried finds beside its arguments; afterwards all of it is as before.

    Runs are let go on one from another until :meth:`settle`: what differs after the second from what was after the
    first is state, and not a cache that the first filled. Later runs all begin alike.

    Attributes:
        is_steady: Whether runs are known to change nothing, so that nothing need be put back between them.
    """

    def __init__(self, reach: Reach, *, is_steady: bool = False) -> None:
        self.reach, self.is_steady, self._is_settled = reach, is_steady, False
        self._iterators: list[tuple[Callable[[Any], object], Replayed]] = []
        for space in reach.spaces:
            self._hold_iterators(space)
        self._start = ReachState(reach, is_start=True)
        self._after: list[ReachState] = []

    def release(self) -> None:
        """Put everything back as it was; iterators give again what runs have taken from them."""
        self._start.restore()
        for put, iterator in self._iterators:
            put(iterator.release())

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around every run of the step."""
        if self._is_settled and not self.is_steady:
            # Not before: backward may still need what the run before has seen.
            self._start.restore()
        try:
            yield
        finally:
            if not self._is_settled:
                self._after.append(ReachState(self.reach, is_start=False))

    def settle(self) -> tuple[tuple[str, NameSpace], ...]:
        """What the runs so far have changed beside the module; from here on every run begins as the first."""
        changed: tuple[tuple[str, NameSpace], ...] = ()
        if self._after:
            first = self._after[-2] if len(self._after) > 1 else self._start
            places = [(name, self.reach.spaces[number]) for number, name in first.differs(self._after[-1])]
            changed = tuple((name, space) for name, space in places if not space.is_module)
            self.is_steady = not any(True for _ in self._start.differs(self._after[-1]))
        self._after, self._is_settled = [], True
        self._start.restore()
        return changed

    def _hold_iterators(self, space: NameSpace) -> None:
        values = dict(self.reach.named(space))
        for holder, key in list(held_iterators(values, iter(values))):
            kind = container(holder)
            replayed = Replayed(kind.__getitem__(holder, key))
            put = partial(space.put, key) if holder is values else partial(kind.__setitem__, holder, key)
            put(replayed)
            self._iterators.append((put, replayed))
