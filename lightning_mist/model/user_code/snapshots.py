"""What a step may change beside parameters, and what trying it finds: remembered, compared, put back.

On its module: the attributes of it and its submodules, containers in them (nested up to a depth), objects of the user's
own classes, the contents of buffers. Beside it: counters on classes, globals, closures, the trainer and its callbacks,
arrays, random generators and iterators.
"""

import random
import sys
from collections.abc import Callable, Iterator
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

_OWN_DICTIONARIES = frozenset(vars(nn.Module())) - {"training"}
"""nn.Module's own registries; parameters, buffers and submodules are compared as such."""


class ModuleState:
    """The state of a module at one time.

    Args:
        with_contents: Whether to copy buffers and tensors among the attributes, so that :meth:`restore` puts their
            contents back.
    """

    def __init__(self, module: nn.Module, *, with_contents: bool = False) -> None:
        self._contents = Contents(with_tensors=with_contents)
        self._spaces = [(name, vars(child), dict(vars(child))) for name, child in module.named_modules()]
        self._frozen = {
            (name, attribute): self._contents.freeze(value)
            for name, _, values in self._spaces
            for attribute, value in values.items()
            if attribute not in _OWN_DICTIONARIES
        }
        for _, _, values in self._spaces:
            for attribute in _OWN_DICTIONARIES & values.keys():
                if isinstance(values[attribute], dict):
                    self._contents.keep_container(values[attribute])
        for buffer in module.buffers():
            self._contents.keep_tensor(buffer)
        # Setting `.data` leaves the version as it is.
        self._versions = {
            name: (id(b), b._version, b.device, address_of(b))
            for name, b in module.named_buffers(remove_duplicate=False)
        }

    def restore(self) -> None:
        """Put everything back as it was."""
        for _, space, values in self._spaces:
            if space.keys() != values.keys() or any(space[name] is not value for name, value in values.items()):
                space.clear()
                space.update(values)
        self._contents.restore()

    def changed_attributes(self, later: "ModuleState") -> Iterator[tuple[str, str]]:
        """Module names and attributes that differ in a later state."""
        for key in {**self._frozen, **later._frozen}:
            if self._frozen.get(key) != later._frozen.get(key):
                yield key

    def changed_buffers(self, later: "ModuleState") -> Iterator[str]:
        """Names of buffers that were written to or replaced."""
        for name, version in later._versions.items():
            if self._versions.get(name) != version:
                yield name

    def new_tensors(self, later: "ModuleState", kind: type[Tensor]) -> Iterator[tuple[str, str]]:
        """Module names and attributes that hold a tensor of a class in a later state and held something else before."""
        before = {name: values for name, _, values in self._spaces}
        for name, _, values in later._spaces:
            for attribute, value in values.items():
                if isinstance(value, kind) and before.get(name, {}).get(attribute) is not value:
                    yield name, attribute


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

_Place = tuple[int, str]  # number of a space and a name in it


def _is_state(value: Any) -> bool:
    """Whether a value is no code, nor what this package answers with meanwhile, such as a recorder of ``log``."""
    is_ours = is_a(value, MethodType) and package_of(value) == __name__.partition(".")[0]
    return not (is_code(value) or is_ours)


class Snapshot:
    """Everything that a step can reach, at one time."""

    def __init__(self, reach: Reach, *, is_start: bool) -> None:
        self._reach = reach
        self._contents = Contents(with_tensors=is_start, largest=MOST_BYTES)
        self.values: dict[_Place, Any] = {}
        self.frozen: dict[_Place, Any] = {}
        for number, space in enumerate(reach.spaces):
            for name, value in reach.named(space):
                if _is_state(value):
                    self.values[number, name] = value
                    self.frozen[number, name] = self._contents.freeze(value)

    def differs(self, later: "Snapshot") -> Iterator[_Place]:
        """Places whose values are others in a later snapshot."""
        for place in {**self.frozen, **later.frozen}:
            if self.frozen.get(place) != later.frozen.get(place):
                yield place

    def restore(self) -> None:
        """Put everything back as it was."""
        for number, space in enumerate(self._reach.spaces):
            now = {name: value for name, value in self._reach.named(space) if _is_state(value)}
            for name in now.keys() - {name for of, name in self.values if of == number}:
                space.remove(name)
        for (number, name), value in self.values.items():
            space = self._reach.spaces[number]
            held = space.values()
            if name not in held or held[name] is not value:
                space.put(name, value)
        self._contents.restore()


class Surroundings:
    """What a step that is tried finds beside its arguments; afterwards all of it is as before.

    Tell it before and after every run. Runs are let go on one from another until :meth:`settle`: what differs after the
    second from what was after the first is state, and not a cache that the first filled. Later runs all begin alike.

    Attributes:
        is_steady: Whether runs are known to change nothing, so that nothing need be put back between them.
    """

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._iterators: list[tuple[Callable[[Any], object], Replayed]] = []
        self._start: Snapshot | None = None
        self._after: list[Snapshot] = []
        self.is_steady, self._is_settled = False, False

    def hold(self) -> None:
        """Remember everything as it is now."""
        for space in self.reach.spaces:
            self._hold_iterators(space)
        self._start = Snapshot(self.reach, is_start=True)

    def release(self) -> None:
        """Put everything back as it was; iterators give again what runs have taken from them."""
        assert self._start is not None
        self._start.restore()
        for put, iterator in self._iterators:
            put(iterator.release())
        self._start, self._iterators = None, []

    def begin_run(self) -> None:
        """A run of the step begins."""
        assert self._start is not None
        if self._is_settled and not self.is_steady:
            # Not before: backward may still need what the run before has seen.
            self._start.restore()

    def end_run(self) -> None:
        """A run of the step has ended, well or not."""
        if not self._is_settled:
            self._after.append(Snapshot(self.reach, is_start=False))

    def settle(self) -> tuple[tuple[str, NameSpace], ...]:
        """What the runs so far have changed beside the module; from here on every run begins as the first."""
        assert self._start is not None
        changed: tuple[tuple[str, NameSpace], ...] = ()
        if self._after:
            first = self._after[-2] if len(self._after) > 1 else self._start
            places = [self._named(place) for place in first.differs(self._after[-1])]
            changed = tuple((name, space) for name, space in places if not space.is_module)
            self.is_steady = not any(True for _ in self._start.differs(self._after[-1]))
        self._after, self._is_settled = [], True
        self._start.restore()
        return changed

    def _named(self, place: _Place) -> tuple[str, NameSpace]:
        number, name = place
        return name, self.reach.spaces[number]

    def _hold_iterators(self, space: NameSpace) -> None:
        values = dict(self.reach.named(space))
        for holder, key in list(held_iterators(values, iter(values))):
            kind = container(holder)
            replayed = Replayed(kind.__getitem__(holder, key))
            put = partial(space.put, key) if holder is values else partial(kind.__setitem__, holder, key)
            put(replayed)
            self._iterators.append((put, replayed))
