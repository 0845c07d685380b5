"""What a step may change on a module besides parameters: remembered, compared, put back.

Covers the attributes of the module and its submodules, containers in them (nested up to a depth), objects of the user's
own classes, the contents of buffers, and torch's generators.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.devices import used_generators
from lightning_mist.model.user_code.contents import Contents, address_of

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
