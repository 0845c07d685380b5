"""Attributes of the user's objects as they are stored, and what is otherwise for a while, for all of a process.

Whoever reads what the user's code can reach looks through here: nothing of the user's runs (``__getattr__``,
properties, ``__class__``, ``__eq__``, ``__iter__``), which may fail, take long, or change something.
"""

import gc
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")

MACHINERY = ("torch", *LIGHTNING, "lightning_mist")
"""Packages that run the user's code, and say in their names what they do."""

LIBRARIES = frozenset(
    (
        *MACHINERY, "lightning_utilities", "torchvision", "torchmetrics", "transformers", "numpy", "scipy", "einops",
    )
)  # fmt: skip
"""Packages whose code has no state of a step beside its arguments."""

_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)


def is_a(value: Any, kinds: Any) -> bool:
    """Whether a value is of a class, or of one of several, whatever it says of its own class."""
    return issubclass(type(value), kinds)


def of_class(value: Any, name: str) -> Any:
    """What the class of a value, or a class itself, has under a name, as it is stored; None if nothing."""
    classes = (value if is_a(value, type) else type(value)).__mro__
    return next((vars(base)[name] for base in classes if name in vars(base)), None)


def own(value: Any) -> Any:
    """The dictionary of an object's own attributes, itself; None if it has none."""
    place = next((vars(base)["__dict__"] for base in type(value).__mro__ if "__dict__" in vars(base)), None)
    found = place.__get__(value) if isinstance(place, (GetSetDescriptorType, MemberDescriptorType)) else None
    return found if is_a(found, dict) else None


def stored(value: Any, name: str) -> Any:
    """What an object, or its class, has under a name, as it is stored; None if nothing."""
    found = own(value)
    return of_class(value, name) if found is None or name not in dict.keys(found) else dict.__getitem__(found, name)


def held(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's own attributes, those in slots too."""
    yield from entries(own(value) or {})
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is MemberDescriptorType and slot.__objclass__ is base:
                with suppress(AttributeError):  # not yet set
                    yield name, slot.__get__(value)


def container(value: Any) -> Any:
    """The standard class that a container is of, whose methods tell and change what it holds; None if it is none."""
    return next((kind for kind in _CONTAINERS if is_a(value, kind)), None)


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Keys, or positions, and items of a container, whatever its class makes of them."""
    kind = container(value)
    yield from kind.items(value) if issubclass(kind, dict) else enumerate(kind.__iter__(value))


def size(value: Any) -> int:
    """How many items a container holds."""
    return int(container(value).__len__(value))


def referent(value: Any) -> Any:
    """What a weak proxy stands for, None if that is gone; anything else itself."""
    try:
        return value.__init__.__self__ if type(value) in ProxyTypes else value
    except ReferenceError:
        return None


def wrapped(function: Any) -> Iterator[Any]:
    """The function inside a method, then those that ``functools.wraps`` says are inside it; anything else itself."""
    seen = set[int]()
    while True:
        function = function.__func__ if is_a(function, (MethodType, staticmethod, classmethod)) else function
        if id(function) in seen:
            return
        seen.add(id(function))
        yield function
        function = dict.get(own(function) or {}, "__wrapped__", function)


def unwrapped(function: Any) -> Any:
    """The innermost function of :func:`wrapped`."""
    return [*wrapped(function)][-1]


def package_of(item: Any) -> str:
    """The package of a module, a class, a function (the one whose globals it uses), or of anything else's class."""
    if is_a(item, ModuleType):
        return str(dict.get(own(item) or {}, "__name__")).partition(".")[0]
    item = item.__func__ if is_a(item, MethodType) else item
    if is_a(item, FunctionType):
        name = item.__globals__.get("__name__", item.__module__)
    else:
        name = (item if is_a(item, (type, BuiltinFunctionType)) else type(item)).__module__
    return str(name).partition(".")[0]


class StandIn:
    """Has the attributes of what it stands for."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # asked of a copy that is yet to be filled
            raise AttributeError(name)
        return getattr(self.inner, name)


@contextmanager
def set_on_class(cls: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, a class has something under a name: its objects, and what is copied or saved of them, have no more."""
    before = vars(cls).get(name)
    setattr(cls, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of an object, or of a module, have other values; behind it those that they had."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def items_replaced(items: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, dictionaries hold other values under names that they have; behind it those that they had."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for space, name, value in items:
            before.append((space, name, space[name]))
            space[name] = value
        yield
    finally:
        for space, name, value in reversed(before):
            space[name] = value


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cyclic garbage in the enclosed block, or the decorated function.

    A search makes millions of small objects and hardly a cycle of them, and the collector goes through all that are
    alive whenever their number has grown by a part. What no cycle holds is freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SharedPatch:
    """A context that changes process-wide state while anyone is inside it.

    The first that enters makes the change and the last that leaves undoes it, in any order and on any thread: ranks
    that share a process take turns inside their steps, so a change that each undid for itself would be undone while
    another still needs it, or restore what another had made.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._change: AbstractContextManager[None] | None = None

    def __call__(self) -> "SharedPatch":
        """The context itself, so that it decorates a function that makes the change."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            if self._change is None:
                change = self._make()
                change.__enter__()
                self._change = change
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._change is not None:
                change, self._change = self._change, None
                change.__exit__(None, None, None)
