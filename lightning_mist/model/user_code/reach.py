"""Which user code may run, and what it can reach beside its arguments: found by reading code, not by running it.

Names in the code of functions are followed: to functions among globals and in closures, to those of modules, to methods
of what the code has at hand. What is found holds for branches too that no batch has taken yet. Names made up while
running (``getattr`` with a computed name) are not followed.
"""

import dis
import functools
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mist.attributes import (
    LIBRARIES,
    LIGHTNING,
    MACHINERY,
    entries,
    is_a,
    of_class,
    own,
    package_of,
    stored,
    unwrapped,
    wrapped,
)

# Whose code it is ------------------------------------------------------------------------------------------------

_FOREIGN_PACKAGES = (*MACHINERY, "transformers", "numpy", "builtins", "logging", "threading", "pandas")
"""Packages whose objects are compared by identity only: they refer to the whole world (the trainer, for example)."""

_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_PLACES = ("/site-packages/", "/dist-packages/")


def is_users(item: Any) -> bool:
    """Whether a function, class or module is the user's own, or a library's that is no part of the machinery."""
    top = package_of(item)
    return top not in LIBRARIES and (top not in sys.stdlib_module_names or top in ("__main__", "__mp_main__"))


def is_users_object(value: Any) -> bool:
    """Whether something is an instance of a class of the user's, whose attributes may change."""
    return (
        not is_a(value, (type, FunctionType, nn.Module, ModuleType))
        and package_of(type(value)) not in _FOREIGN_PACKAGES
        and own(value) is not None
    )


def is_installed(code: CodeType) -> bool:
    """Whether code belongs to an installed package or to Python."""
    name = code.co_filename
    is_known = any(path and name.startswith(path) for path in _INSTALLED)
    return name.startswith("<frozen") or is_known or any(place in name for place in _PLACES)


def is_library(function: Any) -> bool:
    """Whether a function belongs to an installed package or to Python, with nothing of the user's around it."""
    code = code_of(function)
    return (code is None or is_installed(code)) and not users_layers(function)


def is_lightnings(item: Any) -> bool:
    """Whether a function or class is Lightning's own, with nothing of the user's around it."""
    return package_of(unwrapped(item)) in LIGHTNING and not users_layers(item)


def users_layers(function: Any) -> list[Any]:
    """What decorators of the user's own have put around a function, the outermost first."""
    *around, _ = wrapped(function)
    functions = [each for each in around if is_a(each, FunctionType) and not is_installed(each.__code__)]
    return [each for each in functions if package_of(each) not in MACHINERY]


def code_of(function: Any) -> CodeType | None:
    """The code that a function runs, or the one inside what ``functools.wraps`` has made; None of anything else."""
    inner = unwrapped(function)
    return inner.__code__ if is_a(inner, FunctionType) else None


# What names code uses --------------------------------------------------------------------------------------------


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions that are written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> set[str]:
    """The names that code may use: of variables outside of it, of attributes, and those that it has as texts."""
    found = set[str]()
    for each in codes_in(code):
        found.update(each.co_names, each.co_freevars)
        for constant in each.co_consts:
            items = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
            found.update(item for item in items if isinstance(item, str) and item.isidentifier())
    return found


def loaded_names(code: CodeType) -> set[str]:
    """The names that code without source reads, those of its arguments too."""
    instructions = [item for each in codes_in(code) for item in dis.get_instructions(each)]
    read = [item.argval for item in instructions if item.opname.startswith("LOAD")]
    names = [name for value in read for name in (value if isinstance(value, tuple) else (value,))]
    return {name for name in names if isinstance(name, str)}


# What code calls -------------------------------------------------------------------------------------------------


class Code(NamedTuple):
    """Code that may run.

    Attributes:
        code: It.
        space: What its variables stand for: its globals, and what its closure holds.
        holders: What else it has at hand: the object or class whose method it is, values of variables.
    """

    code: CodeType
    space: Mapping[str, Any]
    holders: tuple[Any, ...] = ()

    @classmethod
    def of(cls, function: FunctionType, holders: tuple[Any, ...] = ()) -> "Code":
        """A function's."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closed = {name: value for name, cell in cells for value in contents_of(cell)}
        return cls(function.__code__, ChainMap(closed, function.__globals__), holders)

    def named(self, names: Iterable[str]) -> Iterator[Any]:
        """What some names of variables stand for, where that is known."""
        yield from (self.space[name] for name in names if name in self.space)


def reached(start: Sequence[Code], *, depth: float = inf, inside: int = 0, from_making: bool = False) -> Iterator[Code]:
    """Code, and what it may call by name: each once, and none of the machinery's.

    Functions that are called may be handed what the code that they were reached from has at hand at the start.

    Args:
        depth: How many calls in a row are followed.
        inside: How many of them from one function of an installed package to another.
        from_making: Whether constructors of what exists count too: they may have left hooks behind.
    """
    waiting, seen, given = [(item, depth, item.holders) for item in start], set[Any](), set[CodeType]()
    while waiting:
        item, left, at_start = waiting.pop()
        key = (item.code, left, id(at_start), frozenset(map(_kind, item.holders)))
        if key in seen:
            continue
        seen.add(key)
        if item.code not in given:
            given.add(item.code)
            yield item
        for called in _called(item, at_start, from_making) if left > 0 else ():
            further = min(left - 1, inside) if is_installed(called.code) else left - 1
            waiting.append((called, further, at_start))


def _kind(holder: Any) -> tuple[Any, ...]:
    """What tells apart what holders call: objects of one class call the same, but for functions of their own."""
    if is_a(holder, type):
        return (id(holder),)
    values = dict.values(own(holder) or {})
    return id(type(holder)), *(id(value) for value in values if is_a(value, _FUNCTIONS))


_FUNCTIONS = (FunctionType, MethodType, functools.partial)


def _called(item: Code, at_start: tuple[Any, ...], from_making: bool) -> Iterator[Code]:
    names = names_in(item.code)
    for value in (*item.named(names), *item.holders):
        if is_a(value, _FUNCTIONS):
            members, holders = [value], (value.__self__,) if is_a(value, MethodType) else at_start
        else:
            members, holders = _members(value, names, from_making), at_start if is_a(value, ModuleType) else (value,)
        for member in members:
            for function in _inside(member):
                if is_a(function, FunctionType) and package_of(function) not in MACHINERY:
                    yield Code.of(function, holders)


def _inside(value: Any, outer: tuple[Any, ...] = ()) -> Iterator[Any]:
    """What a value is made of that may run: of functions those that they are around, of properties their functions."""
    for each in wrapped(value):
        if any(each is item for item in outer):
            return
        if is_a(each, property):
            parts: tuple[Any, ...] = (each.fget, each.fset)
        elif is_a(each, functools.cached_property):
            parts = (each.func,)
        elif is_a(each, functools.partial):
            parts = (each.func, *each.args, *each.keywords.values())
        else:
            yield each
            continue
        for part in parts:
            yield from _inside(part, (*outer, each))


def _members(value: Any, names: set[str], from_making: bool) -> list[Any]:
    """What code with such names may call of a class, an object or a module."""
    if is_a(value, ModuleType):
        named = [own(value)[name] for name in names & own(value).keys()]
        # Of a.b.c it is c that is called.
        inner = [item for item in named if is_a(item, ModuleType) and package_of(item) not in MACHINERY]
        return named + [own(module)[name] for module in inner for name in names & own(module).keys()]
    cls = value if is_a(value, type) else type(value)
    if issubclass(cls, torch.optim.Optimizer):
        return []  # it is stepped on gradients wherever these are
    names = names | ({"__init__", "__call__"} if cls is value or from_making else {"__call__"})
    found = {name: vars(base)[name] for base in reversed(cls.__mro__) for name in names.intersection(vars(base))}
    attributes = {} if cls is value else own(value) or {}
    return [*found.values(), *(dict.__getitem__(attributes, name) for name in names & dict.keys(attributes))]


# What code can reach ---------------------------------------------------------------------------------------------

_MOST_FUNCTIONS = 5_000
"""Functions that are followed at most: what a step of a large library reaches has been seen by then."""

_MAKING = ("__init__", "__new__", "__post_init__", "__init_subclass__")
"""Methods that run when an object or a class is made."""


_OF_MODULES = frozenset(vars(ModuleType(""))) | {"__file__", "__path__", "__cached__", "__builtins__", "__module__"}
"""Names by which modules are imported, which code does not change."""

_Roots = Mapping[str, tuple[dict[str, Any], frozenset[str]]]


@dataclass(frozen=True, slots=True)
class NameSpace:
    """A place where values have names."""

    label: str  # what it is, in words: ``"the module"``, ``"class Net"``, ``"globals of train"``
    holder: Any  # a dictionary, a class, or the cell of a closure
    only: frozenset[str] | None = None  # the names that count here; ``None`` for all that the code mentions
    is_module: bool = False  # whether it belongs to the user's module or a part of it

    def values(self) -> Mapping[str, Any]:
        """What it holds now."""
        if isinstance(self.holder, CellType):
            return dict(zip(self.only or (), contents_of(self.holder), strict=False))
        return self.holder if isinstance(self.holder, dict) else vars(self.holder)

    def put(self, name: str, value: Any) -> None:
        """Let a name hold a value."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            self.holder[name] = value
        else:
            type.__setattr__(self.holder, name, value)

    def remove(self, name: str) -> None:
        """Let a name hold nothing."""
        if isinstance(self.holder, CellType):
            del self.holder.cell_contents
        elif isinstance(self.holder, dict):
            self.holder.pop(name, None)
        else:
            type.__delattr__(self.holder, name)


class Reach:
    """What the code of a step can reach: methods of all classes that it comes by are followed from any name in it.

    Args:
        roots: Further dictionaries that it can get at, by what they are, in words: the trainer's, its callbacks'; and
            the names of which its code must have one to get there.
    """

    def __init__(self, module: nn.Module, step: Callable[..., Any], roots: _Roots) -> None:
        self.names: set[str] = set()
        self._seen: set[int] = set()
        self._spaces: dict[int, NameSpace] = {}
        self._classes: dict[type, None] = {}
        self._waiting: list[FunctionType] = []
        self._found = 0
        for name, child in module.named_modules():
            self._add_class(type(child))
            if any(is_users(cls) for cls in type(child).__mro__):
                self._add(NameSpace(f"module {name}" if name else "the module", vars(child), is_module=True))
        self._visit(step)
        for child in module.modules():
            self._visit(of_class(child, "forward"))
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                for _, hook in entries(stored(child, name) or {}):
                    self._visit(hook)
            if any(is_users(cls) for cls in type(child).__mro__):
                for value in list(vars(child).values()):
                    self._visit(value)
        self._follow()
        for label, (root, gates) in roots.items():
            if gates & self.names:
                self._add(NameSpace(label, root))
                for value in list(root.values()):
                    self._visit(value)
        self._follow()
        self.spaces = tuple(self._spaces.values())

    def named(self, space: NameSpace) -> Iterator[tuple[str, Any]]:
        """Names and values of a space that the code mentions."""
        values = space.values()
        for name in values.keys() & (self.names if space.only is None else space.only):
            if name not in _OF_MODULES or space.is_module:
                yield name, values[name]

    def has(self, name: str, space: NameSpace) -> bool:
        """Whether the code can get at a name of a space."""
        return name in self.names and id(space.holder) in self._spaces

    def _add(self, space: NameSpace) -> None:
        self._spaces.setdefault(id(space.holder), space)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if is_users(base) and base not in self._classes:
                self._classes[base] = None
                self._add(NameSpace(f"class {base.__qualname__}", base))

    def _follow(self) -> None:
        """Read functions until no new one is found; methods follow from names that other functions mention."""
        while True:
            while self._waiting and self._found < _MOST_FUNCTIONS:
                self._read(self._waiting.pop())
            for cls in list(self._classes):
                for name, value in list(vars(cls).items()):
                    is_special = name.startswith("__") and cls not in (object, type)
                    # What exists is not made once more, unless code knows the name of its class.
                    is_making = name in _MAKING and cls.__name__ not in self.names
                    if name in self.names or (is_special and not is_making):
                        self._visit(value)
            if not self._waiting or self._found >= _MOST_FUNCTIONS:
                return

    def _visit(self, value: Any) -> None:
        for each in _inside(value):
            if is_a(each, type):
                self._add_class(each)
            elif not is_a(each, FunctionType):
                if is_users_object(each):
                    self._add_class(type(each))
            elif id(each) not in self._seen:
                self._seen.add(id(each))
                if is_users(each):
                    self._waiting.append(each)
                elif "__wrapped__" in vars(each):  # a library's decorator around a function of the user's
                    for cell in each.__closure__ or ():
                        for held in contents_of(cell):
                            self._visit(held)

    def _read(self, function: FunctionType) -> None:
        self._found += 1
        names = names_in(function.__code__)
        self.names |= names
        if vars(function):
            self._add(NameSpace(f"function {function.__qualname__}", vars(function)))
        self._add(
            NameSpace(f"globals of {function.__globals__.get('__name__', function.__module__)}", function.__globals__)
        )
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            space = NameSpace(f"closure of {function.__qualname__}", cell, frozenset((name,)))
            self._add(space)
            for value in contents_of(cell):
                self._visit(value)
        defaults = _defaults(function)
        if defaults:
            self._add(NameSpace(f"defaults of {function.__qualname__}", defaults, frozenset(defaults)))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._visit(value)
            if is_a(value, FunctionType) and is_users(value):
                # Functions may have attributes of their own, now or later.
                self._add(NameSpace(f"function {value.__qualname__}", vars(value)))
            if is_a(value, ModuleType) and is_users(value):
                space = own(value)
                self._add(NameSpace(f"globals of {space.get('__name__')}", space))
                for inner in names & space.keys():
                    self._visit(space[inner])


def contents_of(cell: CellType) -> tuple[Any, ...]:
    """What the cell of a closure holds; nothing if it is not yet set."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    every = {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}
    return {
        name: value
        for name, value in every.items()
        if is_a(value, (list, dict, set)) or of_class(value, "__next__") is not None
    }
