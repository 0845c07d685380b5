"""Code that runs while a batch is trained, and by what names it gets at gradients of single parameters."""

import dis
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from lightning_mist.attributes import is_a, of_class, own, unwrapped, wrapped
from lightning_mist.strategy.user_code.function_code import is_librarys

_MOST_FUNCTIONS = 400

_OF_GRADIENTS = frozenset(
    ("grad", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm", "_foreach_norm")
)
"""Names by which code gets at gradients of single parameters."""

Code = tuple[CodeType, Mapping[str, Any], tuple[Any, ...], bool]
"""Code, its globals, what it may call something of by name (values of variables, or the class it is a method of), and
whether it is the user's: of installed packages only what the user's code calls is read."""


_OF_STATE = frozenset(("state", "state_dict"))
"""Names by which code gets at an optimizer's state."""


def read_in_step(module: Any) -> tuple[str, str, str] | None:
    """What of gradients or optimizer state ``training_step`` may look at: what, by which name, and where; None if none.

    What it calls is looked for in the module, in its submodules and in what else it has as attributes.
    """
    holders = {type(item): item for item in (*vars(module).values(), *module.modules(), module)}
    functions = [item for item in wrapped(module.training_step) if is_a(item, FunctionType)]
    if unwrapped(module.training_step) not in functions:
        return "gradients", type(module.training_step).__name__, "which is not read"
    for what, wanted in (("gradients", _OF_GRADIENTS), ("optimizer state", _OF_STATE)):
        waiting = [(item.__code__, item.__globals__, tuple(holders.values()), True) for item in functions]
        if (found := _read_in(waiting, wanted)) is not None:
            return what, *found
    return None


def gradients_read_in(waiting: list[Code]) -> tuple[str, str] | None:
    """The first name by which code, and what it calls by name, gets at gradients, and where; None if by none."""
    return _read_in(waiting, _OF_GRADIENTS)


def _read_in(waiting: list[Code], wanted: frozenset[str]) -> tuple[str, str] | None:
    seen: set[tuple[CodeType, tuple[int, ...]]] = set()
    while waiting:
        code, space, holders, is_users = waiting.pop()
        if (key := (code, tuple(map(id, holders)))) in seen:
            continue
        seen.add(key)
        names = set(_attributes(code))
        if found := sorted(names & wanted):
            return found[0], f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"
        if len(seen) > _MOST_FUNCTIONS:
            return "too much to read", code.co_name
        for value in (*(space[name] for name in names & space.keys()), *holders) if is_users else ():
            waiting += _called(value, names)
    return None


def is_known(space: Mapping[str, Any]) -> bool:
    """Whether code with these globals is of this package or of those whose names say what they do to gradients."""
    top = str(space.get("__name__", "")).partition(".")[0]
    return top in ("lightning_mist", "lightning", "lightning_fabric", "pytorch_lightning", "torch")


def _attributes(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if name != "grad" or _reads_gradient(code))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes(constant)


def _reads_gradient(code: CodeType) -> bool:
    """Whether ``.grad`` in code is that of something else than ``torch.autograd``, whose gradients are returned."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.argval == "grad" and "GLOBAL" not in instruction.opname and before != "autograd":
            return True
        before = instruction.argval
    return False


def _called(value: Any, names: set[str]) -> Iterator[Code]:
    """A function of the user's, or what code with such names may call of a class, an object or a module."""
    owners: tuple[type, ...] = ()
    members: list[Any]
    if is_a(value, (FunctionType, MethodType)):
        members = [value]
    elif is_a(value, ModuleType):
        named = [member for name, member in own(value).items() if name in names]
        members = [member for member in named if not is_a(member, ModuleType)]
        # Of a.b.c it is c that is called.
        inner = [item for item in named if is_a(item, ModuleType) and item is not value and not is_known(own(item))]
        for module in inner:
            members += [member for name, member in own(module).items() if name in names]
    else:
        cls = value if is_a(value, type) else type(value)
        if issubclass(cls, torch.optim.Optimizer):
            return  # it is stepped on gradients wherever these are
        members, owners = [of_class(cls, name) for name in (*names, "__init__", "__call__")], (cls,)
    for member in members:
        for function in wrapped(member.fget if is_a(member, property) else member):
            if is_a(function, FunctionType) and not is_known(function.__globals__):
                yield function.__code__, function.__globals__, owners, not is_librarys(function.__code__)
