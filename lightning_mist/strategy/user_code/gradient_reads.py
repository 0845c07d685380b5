"""By what names code that runs while a batch is trained gets at gradients, or at an optimizer's state."""

import dis
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

from lightning_mist.attributes import is_a, unwrapped, wrapped
from lightning_mist.model.user_code import Code, codes_in, is_installed, names_in, reached, users_layers

_MOST_FUNCTIONS = 400

_OF_GRADIENTS = frozenset(
    ("grad", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm", "_foreach_norm")
)
"""Names by which code gets at gradients of single parameters."""

_OF_STATE = frozenset(("state", "state_dict"))
"""Names by which code gets at an optimizer's state."""

_WORD = "grad"
_NO_GRADIENTS = frozenset(
    (
        "no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_", "zero_grad",
        "on_before_zero_grad", "optimizer_zero_grad", "accumulate_grad_batches",
    )
)  # fmt: skip
"""Names with that word which say nothing of gradients' values."""

_DEPTH, _INSIDE = 4, 2
"""Calls in a row in which the word is looked for: of the user's functions, and inside of installed packages."""


def read_in_step(module: Any) -> tuple[str, str, str] | None:
    """What of gradients or optimizer state ``training_step`` may look at: what, by which name, and where; None if none.

    What it calls is looked for in the module, in its submodules and in what else it has as attributes.
    """
    holders = {type(item): item for item in (*vars(module).values(), *module.modules(), module)}
    functions = [item for item in wrapped(module.training_step) if is_a(item, FunctionType)]
    if unwrapped(module.training_step) not in functions:
        return "gradients", type(module.training_step).__name__, "which is not read"
    start = [Code.of(item, tuple(holders.values())) for item in functions]
    for what, wanted in (("gradients", _OF_GRADIENTS), ("optimizer state", _OF_STATE)):
        if (found := _read_in(start, wanted)) is not None:
            return what, *found
    return None


def gradients_read_in(start: list[Code]) -> tuple[str, str] | None:
    """The first name by which code, and what it calls by name, gets at gradients, and where; None if by none."""
    return _read_in(start, _OF_GRADIENTS)


def _read_in(start: list[Code], wanted: frozenset[str]) -> tuple[str, str] | None:
    # Of installed packages only what the user's code calls is read.
    for number, (code, _, _) in enumerate(reached(start, from_making=True)):
        attributes = {name for each in codes_in(code) for name in each.co_names if name != "grad" or _has_grad(each)}
        if found := sorted(attributes & wanted):
            return found[0], f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"
        if number == _MOST_FUNCTIONS:
            return "too much to read", code.co_name
    return None


def _has_grad(code: CodeType) -> bool:
    """Whether ``.grad`` in code is that of something else than ``torch.autograd``, whose gradients are returned."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.argval == "grad" and "GLOBAL" not in instruction.opname and before != "autograd":
            return True
        before = instruction.argval
    return False


def mentions_gradients(function: Any, owner: Any = None) -> bool:
    """Whether code, or what it calls by name, has to do with gradients' values; True where it is too much to read."""
    return words_of_gradients((*users_layers(function), unwrapped(function)), owner)


def words_of_gradients(functions: Iterable[Any], owner: Any) -> bool:
    """The same of the code of functions themselves, without what they are around."""
    for function in functions:
        if is_a(function, FunctionType):
            start = Code.of(function, () if owner is None else (owner,))
            depth = _INSIDE if is_installed(start.code) else _DEPTH
            for number, item in enumerate(reached([start], depth=depth, inside=_INSIDE)):
                words = {name for name in names_in(item.code) if _WORD in name.lower()}
                if words - _NO_GRADIENTS or number == _MOST_FUNCTIONS:
                    return True
    return False
