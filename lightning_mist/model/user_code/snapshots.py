"""What a step may change beside parameters, and what trying it finds: remembered, compared, put back.

On its module: the attributes of it and its submodules, containers in them (nested up to a depth), objects of the user's
own classes, the contents of buffers. Beside it: counters on classes, globals, closures, the trainer and its callbacks,
arrays, random generators and iterators.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.attributes import container, is_a, package_of
from lightning_mist.devices import used_generators
from lightning_mist.model.user_code.contents import (
    MOST_BYTES,
    Contents,
    Replayed,
    address_of,
    held_iterators,
    is_code,
)
from lightning_mist.model.user_code.reach import NameSpace, Reach

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
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Continue from these states."""
        torch.set_rng_state(self._torch)
        for generator, state in self._devices:
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generators) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        states = [self._torch, *(state for _, state in self._devices)]
        numpy = None if self._numpy is None else _comparable(self._numpy)
        return (*(bytes(state.numpy()) for state in states), self._python, numpy)

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
        if (
            self._numpy is not None
            and later._numpy is not None
            and _comparable(self._numpy) != _comparable(later._numpy)
        ):
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
    """Whether a value is no code, nor what this package answers with meanwhile, such as a recorder of ``log``."""
    is_ours = is_a(value, MethodType) and package_of(value) == __name__.partition(".")[0]
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
