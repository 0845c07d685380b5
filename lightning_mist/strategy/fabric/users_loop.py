"""What planning must know of a loop that the user writes: where Lightning has a trainer, there is only code."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getattr_static
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_mist.plan import Exclusion
from lightning_mist.strategy.user_code import GRADIENTS_AWAY, exclusions_of, is_library

_MOST_FUNCTIONS = 400

_OF_GRADIENTS = frozenset(
    ("grad", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm", "_foreach_norm")
)
"""Names by which code gets at gradients of single parameters."""


@dataclass(kw_only=True)
class UsersLoop:
    """Stands for a trainer where there is none, as far as planning asks for one.

    Attributes:
        lightning_module: The module that is trained.
        precision: Name of the precision.
    """

    lightning_module: nn.Module
    precision: str
    callbacks: list[Any] = field(default_factory=list)
    loggers: list[Any] = field(default_factory=list)
    datamodule: None = None
    gradient_clip_val: None = None
    accumulate_grad_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of a module, as a batch that can be cut and sent.

    Attributes:
        positional: Arguments by position, as a mapping: a list of as many entries as rows could be taken for rows.
        named: Arguments by name.
    """

    positional: dict[str, Any]
    named: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Call":
        """Of arguments."""
        return cls(positional={str(index): item for index, item in enumerate(args)}, named=dict(kwargs))

    def to(self, function: Callable[..., Any]) -> Any:
        """Call a function."""
        return function(*self.positional.values(), **self.named)


def loop_exclusions(frame: FrameType | None = None) -> tuple[Exclusion, ...]:
    """What the code that is running, up from a frame, and what it calls by name, rules out."""
    found = _looks_at_gradients(sys._getframe(1) if frame is None else frame)
    if found is None:
        return ()
    name, place = found
    reason = f"the loop may look at gradients ({name} in {place}), which would not all be on every rank"
    return exclusions_of([(reason, GRADIENTS_AWAY)])


_Found = tuple[CodeType, Mapping[str, Any], tuple[Any, ...], bool]
"""Code, its globals, what it may call something of by name (values of variables, or the class it is a method of), and
whether it is the user's: of installed packages only what the user's code calls is read."""


def _looks_at_gradients(frame: FrameType | None) -> tuple[str, str] | None:
    waiting: list[_Found] = []
    while frame is not None:
        function = FunctionType(frame.f_code.replace(co_freevars=()), frame.f_globals)
        if not _is_known(frame.f_globals) and not is_library(function):
            waiting.append((frame.f_code, frame.f_globals, tuple(frame.f_locals.values()), True))
        frame = frame.f_back
    seen: set[tuple[CodeType, tuple[int, ...]]] = set()
    while waiting:
        code, space, holders, is_users = waiting.pop()
        if (key := (code, tuple(map(id, holders)))) in seen:
            continue
        seen.add(key)
        names = set(_attributes(code))
        if found := sorted(names & _OF_GRADIENTS):
            return found[0], f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"
        if len(seen) > _MOST_FUNCTIONS:
            return "too much to read", code.co_name
        for value in (*(space[name] for name in names & space.keys()), *holders) if is_users else ():
            waiting += _called(value, names)
    return None


def _is_known(space: Mapping[str, Any]) -> bool:
    """Whether code with these globals is of this package or of those whose names say what they do to gradients."""
    top = str(space.get("__name__", "")).partition(".")[0]
    return top in ("lightning_mist", "lightning", "lightning_fabric", "torch")


def _attributes(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes(constant)


def _called(value: Any, names: set[str]) -> Iterator[_Found]:
    """A function of the user's, or what code with such names may call of a class, an object or a module."""
    owners: tuple[type, ...] = ()
    if isinstance(value, (FunctionType, MethodType)):
        members = [value]
    elif inspect.ismodule(value):
        named = [member for name, member in vars(value).items() if name in names]
        members = [member for member in named if not inspect.ismodule(member)]
        # Of a.b.c it is c that is called.
        inner = [item for item in named if inspect.ismodule(item) and item is not value and not _is_known(vars(item))]
        for module in inner:
            members += [member for name, member in vars(module).items() if name in names]
    else:
        cls = value if inspect.isclass(value) else type(value)
        if issubclass(cls, torch.optim.Optimizer):
            return  # it is stepped on gradients wherever these are
        members, owners = [getattr_static(cls, name, None) for name in (*names, "__init__", "__call__")], (cls,)
    for member in members:
        plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        function = inspect.unwrap(plain) if callable(plain) else None
        if isinstance(function, FunctionType) and not _is_known(function.__globals__):
            yield function.__code__, function.__globals__, owners, not is_library(function)
