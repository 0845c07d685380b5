"""What can be reached of the module that is trained, known from what objects hold, without running anything."""

import functools
import inspect
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_DEPTH = 4
"""How deep containers and objects are looked into."""

_MOST_ENTRIES = 10_000

_NOTHING = (bool, int, float, str, bytes, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)

_GRADIENT_WORD = "grad"
_NO_GRADIENTS = frozenset(
    {
        "no_grad",
        "enable_grad",
        "set_grad_enabled",
        "is_grad_enabled",
        "requires_grad",
        "requires_grad_",
        "zero_grad",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "accumulate_grad_batches",
    }
)
"""Names with that word which say nothing of gradients' values."""


@dataclass(frozen=True, slots=True)
class Known:
    """A value that an expression of the user's code stands for when the plan is made."""

    value: Any


@dataclass(frozen=True, slots=True)
class Method:
    """A function and the object that it is called on."""

    owner: Any
    function: Any


@dataclass(frozen=True, slots=True)
class Groups:
    """An optimizer's parameter groups, or one of them."""

    is_one: bool


@dataclass(frozen=True, slots=True)
class Super:
    """What ``super()`` stands for in a function that a class of this object defines."""

    owner: Any
    function: Any


class Everything:
    """The objects of one fit, and what reaches the parameters of its module.

    Args:
        trainer: Lightning's trainer, its module and strategy attached.
        optimizers: The optimizers.
    """

    def __init__(self, trainer: Any, optimizers: Iterable[Any]) -> None:
        self.trainer, self.module = trainer, trainer.lightning_module
        self.strategy = getattr(trainer, "strategy", None)
        self.optimizers = list(optimizers)
        parameters = self.module.parameters() if isinstance(self.module, nn.Module) else ()
        self._parameters = {id(parameter) for parameter in parameters}

    def holds(self, value: Any) -> bool:
        """Whether parameters of the module can be reached from a value."""
        if isinstance(value, Known):
            value = value.value
        if isinstance(value, Method):
            return self.holds(value.owner)
        if isinstance(value, Groups):
            return True
        return not isinstance(value, Super) and self._holds(value, _DEPTH, set())

    def is_optimizer(self, value: Any) -> bool:
        """Whether a value is one of the optimizers, perhaps as Lightning wraps them."""
        inner = getattr(value, "_optimizer", value)
        return isinstance(inner, torch.optim.Optimizer)

    def _holds(self, value: Any, depth: int, seen: set[int]) -> bool:
        if value is None or isinstance(value, _NOTHING) or id(value) in seen:
            return False
        seen.add(id(value))
        if value is self.trainer or value is self.strategy:
            return True
        if isinstance(value, Tensor):
            return id(value) in self._parameters or id(value._base) in self._parameters
        if isinstance(value, nn.Module):
            return any(id(parameter) in self._parameters for parameter in value.parameters())
        return depth > 0 and any(self._holds(item, depth - 1, seen) for item in self._contents(value))

    def _contents(self, value: Any) -> Iterable[Any]:
        """What a container or an object has."""
        if self.is_optimizer(value):
            return [parameter for group in value.param_groups for parameter in group["params"]]
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, weakref.ref):
            return [value()]
        if isinstance(value, dict):
            return list(value.values())[:_MOST_ENTRIES]
        if isinstance(value, (list, tuple, set, frozenset)):
            return list(value)[:_MOST_ENTRIES]
        return _attributes(value)


def _attributes(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    own = getattr(value, "__dict__", {})
    return [item for name, item in own.items() if name not in ("trainer", "_trainer", "_fabric")]


def is_lightnings(item: Any) -> bool:
    """Whether a function or class is Lightning's own."""
    cls = item if isinstance(item, type) or inspect.isroutine(item) else type(item)
    return str(getattr(cls, "__module__", "")).partition(".")[0] in _LIGHTNING


def is_library(function: Any) -> bool:
    """Whether a function belongs to an installed package or to Python, and not to the user's project."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    name = code.co_filename
    return name.startswith("<frozen") or any(path and name.startswith(path) for path in _LIBRARIES)


def mentions_gradients(function: Any, owner: Any = None) -> bool:
    """Whether code, or what it calls by name, has to do with gradients' values; True where it is too much to read."""
    waiting, seen = [(inspect.unwrap(function), 4)], set()
    while waiting:
        item, depth = waiting.pop()
        code = getattr(item, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        if len(seen) > 400:
            return True
        names = set(_names(code))
        if any(_GRADIENT_WORD in name.lower() and name not in _NO_GRADIENTS for name in names):
            return True
        if depth == 0:
            continue
        # Of a library only what is called directly is looked at, and torch says in its names what it does.
        left = min(depth - 1, 1) if is_library(item) else depth - 1
        for name in names:
            called = (item.__globals__.get(name), _of_class(owner, name), _of_modules(item, name, names))
            waiting += [(found, left) for found in called if found is not None and not _is_torchs(found)]
    return False


def _is_torchs(item: Any) -> bool:
    return str(getattr(item, "__module__", "")).partition(".")[0] in ("torch", *_LIGHTNING)


def names_of(function: Any) -> frozenset[str]:
    """The names that a function's code uses."""
    return frozenset(_names(inspect.unwrap(function).__code__))


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _of_class(owner: Any, name: str) -> Any:
    found = inspect.getattr_static(owner, name, None) if owner is not None else None
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    return inspect.unwrap(found) if inspect.isfunction(found) else None


def _of_modules(function: Any, name: str, names: set[str]) -> Any:
    """A function that is called as an attribute of an imported module."""
    for other in names:
        module = function.__globals__.get(other)
        if isinstance(module, types.ModuleType) and module is sys.modules.get(module.__name__):
            found = vars(module).get(name)
            if inspect.isfunction(found):
                return inspect.unwrap(found)
    return None
