"""What can be told of functions by their code: whose they are, their source, the names that they use."""

import ast
import dis
import linecache
import sys
import sysconfig
import types
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from lightning_mist.attributes import is_a, own, package_of, stored, unwrapped, wrapped

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_PLACES = ("/site-packages/", "/dist-packages/")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_SPOKEN = ("torch", *_LIGHTNING)  # whose names say what they do

_GRADIENT_WORD = "grad"
_NO_GRADIENTS = frozenset(
    (
        "no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_", "zero_grad",
        "on_before_zero_grad", "optimizer_zero_grad", "accumulate_grad_batches",
    )
)  # fmt: skip
"""Names with that word which say nothing of gradients' values."""


@lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def body_of(code: types.CodeType) -> list[ast.stmt] | None:
    """What a function does; of several lambdas on one line, what all of them do; None if its source is not at hand."""
    tree = _tree(code.co_filename)
    found: list[ast.Lambda] = []
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            if code.co_firstlineno in (node.lineno, *(item.lineno for item in node.decorator_list)):
                return node.body
        elif isinstance(node, ast.Lambda) and (code.co_name, code.co_firstlineno) == ("<lambda>", node.lineno):
            found.append(node)
    names = list(code.co_varnames[: code.co_argcount])
    found = [node for node in found if [item.arg for item in node.args.args] == names] or found
    return [ast.copy_location(ast.Return(value=node.body), node) for node in found] or None


def loaded_names(code: types.CodeType) -> set[str]:
    """The names that code without source reads."""
    found = {
        name
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith("LOAD")
        for name in (instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        if isinstance(name, str)
    }
    return found.union(*(loaded_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def is_lightnings(item: Any) -> bool:
    """Whether a function or class is Lightning's own, with nothing of the user's around it."""
    return package_of(unwrapped(item)) in _LIGHTNING and not users_layers(item)


def users_layers(function: Any) -> list[Any]:
    """What decorators of the user's own have put around a function, the outermost first."""
    *around, _ = wrapped(function)
    functions = [each for each in around if is_a(each, types.FunctionType) and not is_librarys(each.__code__)]
    return [each for each in functions if package_of(each) not in _SPOKEN]


def code_of(function: Any) -> types.CodeType | None:
    """The code that a function runs, or the one inside what ``functools.wraps`` has made; None of anything else."""
    inner = unwrapped(function)
    return inner.__code__ if is_a(inner, types.FunctionType) else None


def is_library(function: Any) -> bool:
    """Whether a function belongs to an installed package or to Python, with nothing of the user's around it."""
    code = code_of(function)
    return (code is None or is_librarys(code)) and not users_layers(function)


def is_librarys(code: types.CodeType) -> bool:
    """Whether code belongs to an installed package or to Python."""
    name = code.co_filename
    is_installed = any(path and name.startswith(path) for path in _LIBRARIES)
    return name.startswith("<frozen") or is_installed or any(place in name for place in _PLACES)


def mentions_gradients(function: Any, owner: Any = None) -> bool:
    """Whether code, or what it calls by name, has to do with gradients' values; True where it is too much to read."""
    return words_of_gradients((*users_layers(function), unwrapped(function)), owner)


def words_of_gradients(functions: Iterable[Any], owner: Any) -> bool:
    """The same of the code of functions themselves, without what they are around."""
    waiting, seen = [(function, 4) for function in functions], set()
    while waiting:
        item, depth = waiting.pop()
        if not is_a(item, types.FunctionType) or (code := item.__code__) in seen:
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
            called = (item.__globals__.get(name), stored(owner, name), _of_modules(item, name, names))
            found = [layer for each in called for layer in (*users_layers(each), unwrapped(each))]
            waiting += [(layer, left) for layer in found if package_of(layer) not in _SPOKEN]
    return False


def names_of(function: Any, *, inside: bool = True) -> frozenset[str]:
    """The names that a function's code uses: that of the innermost, or its own."""
    code = code_of(function) if inside else function.__code__
    return frozenset(() if code is None else _names(code))


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _of_modules(function: Any, name: str, names: set[str]) -> Any:
    """A function that is called as an attribute of an imported module."""
    for other in names:
        module = function.__globals__.get(other)
        if is_a(module, types.ModuleType) and module is sys.modules.get(str(stored(module, "__name__"))):
            found = own(module).get(name)
            if is_a(found, types.FunctionType):
                return found
    return None
