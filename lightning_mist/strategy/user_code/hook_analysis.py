"""Reading the user's code: can a hook reach parameters, does a step or a loop look at gradients?

A hook's source is walked with what its names stand for when the plan is made. Whatever is not understood counts as
reached, so that a hook that only looks at a loss, prints or counts costs nothing, and none that looks at more goes
unseen. Of steps and loops the names count by which code gets at gradients.
"""

import ast
import builtins
import dis
import inspect
import linecache
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lightning_mist.attributes import entries, is_a, of_class, unwrapped, wrapped
from lightning_mist.model.user_code import (
    Code,
    code_of,
    codes_in,
    is_installed,
    is_library,
    is_lightnings,
    loaded_names,
    names_in,
    reached,
    users_layers,
)
from lightning_mist.strategy.user_code.fit_objects import (
    MODULE_METHODS,
    ROUTINES,
    FitObjects,
    Groups,
    Known,
    Method,
    Resolver,
    Super,
    UnreadableError,
)

_MOST_FUNCTIONS = 200

_HARMLESS = (isinstance, type, id, hasattr, callable, issubclass, bool, len)
"""Functions that give nothing of what they are called with."""

_SUBSCRIPTED: tuple[Any, ...] = (list, tuple, dict, nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ReachedError(Exception):
    """Parameters are reached, or may be."""

    def __init__(self, what: str, callee: Any = None, *, is_state: bool = False) -> None:
        super().__init__(what)
        self.what, self.callee, self.is_state = what, callee, is_state


class Reader:
    """Reads functions for what they can reach."""

    def __init__(self, objects: FitObjects) -> None:
        self._all = objects
        self.read: list[tuple[Any, Any]] = []
        self._open: set[tuple[Any, int]] = set()

    def call(self, function: Any, owner: Any, arguments: Sequence[Any], keywords: dict[str, Any] | None = None) -> Any:
        """What a function gives that is called on an object (None if it is no method) with some known arguments.

        Raises:
            ReachedError: If it reaches parameters, or it cannot be told.
        """
        *_, inner = wrapped(function)
        values, keywords = ([] if owner is None else [Known(owner)]) + list(arguments), keywords or {}
        if code_of(inner) is None:
            raise ReachedError(_name_of(inner), inner)
        given = [self._around(each, function, owner, values, keywords) for each in users_layers(function)]
        if not is_library(inner):
            given.append(self._read(inner, owner, values, keywords))
        elif not is_lightnings(inner) and any(self._all.holds(value) for value in (*values, *keywords.values())):
            raise ReachedError(_name_of(inner), inner)
        return next((value for value in given if value is not None), None)

    def _around(self, layer: Any, function: Any, owner: Any, values: list[Any], keywords: dict[str, Any]) -> Any:
        """What a decorator has put around a function is read if it speaks of gradients or parameters by some name."""
        if not words_of_gradients([layer], owner) and self._all.words.isdisjoint(names_in(layer.__code__)):
            return None
        inside = {(each.__code__, id(None)) for each in wrapped(function) if is_a(each, FunctionType)}
        before, self._open = self._open, self._open | inside - {(layer.__code__, id(None))}
        try:
            return self._read(layer, owner, values, keywords)
        finally:
            self._open = before

    def _read(self, function: Any, owner: Any, values: list[Any], keywords: dict[str, Any]) -> Any:
        code = function.__code__
        key = (code, id(owner))
        if key in self._open:
            return None
        self._open.add(key)
        self.read.append((function, owner))
        if len(self.read) > _MOST_FUNCTIONS:
            raise ReachedError(f"{function.__name__}, which calls more than can be read", function)
        try:
            names = _named_arguments(code, values, keywords)
            walk = _Walk(self, self._all, function, owner, names)
            walk.block(self._body(function, names))
        finally:
            self._open.discard(key)
        found = [value for value in walk.returned if value is not None]
        if len(found) == len(walk.returned) == 1:
            return found[0]
        if any(self._all.holds(value) for value in found):
            raise ReachedError(f"what {function.__name__} returns")
        return None

    def _body(self, function: Any, names: dict[str, Any]) -> list[ast.stmt]:
        body = body_of(function.__code__)
        if body is None:
            space = Code.of(function).space
            used = [names.get(name, Known(space.get(name))) for name in loaded_names(function.__code__)]
            if any(value is not None and self._all.holds(value) for value in used):
                place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                is_there = Path(function.__code__.co_filename).exists()
                why = f"is not at {place}: has the file changed meanwhile?" if is_there else "is not at hand"
                raise ReachedError(f"{function.__name__}, whose source {why}", function)
        return body or []


def _named_arguments(code: CodeType, values: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """What the names of a function stand for when it is called so."""
    names: dict[str, Any] = dict.fromkeys((*code.co_varnames, *code.co_cellvars))
    positional = code.co_varnames[: code.co_argcount]
    names.update(zip(positional, values, strict=False))
    rest = [value for value in values[len(positional) :] if value is not None]
    flags, keyword_only = code.co_flags, code.co_argcount + code.co_kwonlyargcount
    extra = {name: value for name, value in keywords.items() if name not in code.co_varnames[:keyword_only]}
    names.update({name: value for name, value in keywords.items() if name not in extra})
    if flags & inspect.CO_VARARGS and rest:
        names[code.co_varnames[keyword_only]] = Known(tuple(_plain(value) for value in rest))
    if flags & inspect.CO_VARKEYWORDS and extra:
        place = keyword_only + bool(flags & inspect.CO_VARARGS)
        names[code.co_varnames[place]] = Known({name: _plain(value) for name, value in extra.items()})
    return names


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Known) else value


@lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def body_of(code: CodeType) -> list[ast.stmt] | None:
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


class _Walk:
    """One function's source, walked with what its names stand for."""

    def __init__(self, reader: Reader, objects: FitObjects, function: Any, owner: Any, names: dict[str, Any]) -> None:
        self._reader, self._all, self._function, self._owner, self._names = reader, objects, function, owner, names
        self.returned: list[Any] = []
        self._space = Code.of(function).space
        self._resolver = Resolver(objects, lambda getter, owner: reader.call(getter, owner, ()))

    # Statements --------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            self._assign(node)
        elif isinstance(node, ast.Return):
            self.returned.append(None if node.value is None else self.value(node.value))
        elif isinstance(node, (ast.If, ast.While)):
            self._test(node.test)
            self._either(node.body, node.orelse)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._bind(node.target, node.iter)
            self.block(node.body + node.orelse)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._inner(node.args, lambda: self.block(node.body))
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif not isinstance(node, ast.ClassDef):
            self._on_other(node)

    def _either(self, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        """Of two ways one is gone, or none: a name stands for parameters if it does on any."""
        before = dict(self._names)
        ways = [before]
        for way in (body, orelse):
            self._names.clear()
            self._names.update(before)
            self.block(way)
            ways.append(dict(self._names))
        for name in {name for way in ways for name in way}:
            found = [way[name] for way in reversed(ways) if name in way]
            self._names[name] = next((value for value in found if self._all.holds(value)), found[0])

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and node.value is not None:
            self._names[targets[0].id] = self.value(node.value)
            return
        is_pairs = len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        if is_pairs and all(isinstance(item, ast.Name) for item in targets[0].elts):  # type: ignore[attr-defined]
            names = [item.id for item in targets[0].elts]  # type: ignore[attr-defined]
            found = [self.value(item) for item in node.value.elts]  # type: ignore[union-attr]
            if len(names) == len(found):
                self._names.update(zip(names, found, strict=True))
                return
        if node.value is not None:
            self._plainly(node.value)
        for target in targets:
            self._target(target)

    def _target(self, node: ast.expr) -> None:
        if isinstance(node, ast.Attribute):
            self.value(node.value)
        elif isinstance(node, ast.Subscript):
            self.value(node)
        elif isinstance(node, (ast.Tuple, ast.List)):
            for item in node.elts:
                self._target(item)
        elif isinstance(node, ast.Name):
            self._names[node.id] = None

    def _bind(self, target: ast.expr, source: ast.expr) -> None:
        name, given = (ast.unparse(source.func), source.args) if isinstance(source, ast.Call) else ("", [])
        several = target.elts if isinstance(target, ast.Tuple) else []
        if name == "reversed" and len(given) == 1:
            return self._bind(target, given[0])
        if name == "enumerate" and given and len(several) == 2:
            return self._bind(several[1], given[0])
        if name == "zip" and len(given) == len(several) > 0:
            for each, item in zip(several, given, strict=True):
                self._bind(each, item)
            return None
        found = self.value(source)
        if isinstance(found, Groups) and not found.is_one and isinstance(target, ast.Name):
            self._names[target.id] = Groups(is_one=True)
            return None
        if isinstance(found, Known) and is_a(found.value, (list, tuple)) and isinstance(target, ast.Name):
            held = [item for _, item in entries(found.value) if self._all.holds(item)]
            if held and all(self._all.is_optimizer(item) for item in held):
                self._names[target.id] = Known(held[0])
                return None
        self._refuse(found, source)
        return self._target(target)

    # Expressions -------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """What an expression stands for, where that is known; it may be something that reaches parameters."""
        return getattr(self, f"_on_{type(node).__name__.lower()}", self._on_other)(node)

    def _on_name(self, node: ast.Name) -> Any:
        if node.id in self._names:
            return self._names[node.id]
        space = self._space if node.id in self._space else vars(builtins)
        return Known(space[node.id]) if node.id in space else None

    def _on_attribute(self, node: ast.Attribute) -> Any:
        return self._attribute(self.value(node.value), node.attr, node)

    def _on_namedexpr(self, node: ast.NamedExpr) -> Any:
        found = self._names[node.target.id] = self.value(node.value)
        return found

    def _on_ifexp(self, node: ast.IfExp) -> None:
        self._test(node.test)
        self._plainly(node.body)
        self._plainly(node.orelse)

    def _on_compare(self, node: ast.Compare) -> None:
        self._test(node)

    def _on_unaryop(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._test(node.operand)
        else:
            self._plainly(node.operand)

    def _on_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for part in node.generators:
            self._bind(part.target, part.iter)
            for test in part.ifs:
                self._test(test)
        for child in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self._plainly(child)

    _on_setcomp = _on_generatorexp = _on_dictcomp = _on_listcomp

    def _on_lambda(self, node: ast.Lambda) -> None:
        self._inner(node.args, lambda: self._plainly(node.body))

    def _inner(self, arguments: ast.arguments, walk: Callable[[], None]) -> None:
        """Walk a function inside this one, whose arguments have names of their own."""
        kept = dict(self._names)
        self._names.update(dict.fromkeys(argument.arg for argument in arguments.args))
        walk()
        self._names.update(kept)

    def _on_other(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child)
            elif isinstance(child, ast.expr):
                self._plainly(child)
            else:
                self._on_other(child)

    def _plainly(self, node: ast.expr) -> None:
        """An expression whose value goes where it is not followed."""
        self._refuse(self.value(node), node)

    def _test(self, node: ast.expr) -> None:
        """An expression of which only the truth, or the identity, is asked."""
        if isinstance(node, ast.BoolOp):
            for item in node.values:
                self._test(item)
        elif isinstance(node, ast.Compare):
            for item in (node.left, *node.comparators):
                self._test(item)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._test(node.operand)
        else:
            found = self.value(node)
            if is_a(_plain(found), Tensor):
                self._refuse(found, node)

    def _refuse(self, value: Any, node: ast.AST) -> None:
        if value is not None and self._all.holds(value):
            self._reached(node, value.function if isinstance(value, Method) else None, is_state=self._is_state(value))

    def _is_state(self, *values: Any) -> bool:
        # Groups have on every rank the parameters that it updates.
        return any(isinstance(value, Groups) or self._all.is_optimizer(_plain(value)) for value in values)

    def _reached(self, node: ast.AST, callee: Any = None, *, is_state: bool = False) -> NoReturn:
        name, what = self._function.__code__.co_filename.replace("\\", "/").rpartition("/")[2], ast.unparse(node)
        what = what if len(what) <= 60 else f"{what[:57]}..."
        raise ReachedError(f"{what} at {name}:{getattr(node, 'lineno', 0)}", callee, is_state=is_state)

    def _on_subscript(self, node: ast.Subscript) -> Any:
        base = self.value(node.value)
        self._plainly(node.slice)
        key: Any = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(base, Groups):
            if not base.is_one and not isinstance(node.slice, ast.Slice):
                return Groups(is_one=True)
            if base.is_one and isinstance(key, str) and key != "params":
                return None
            self._reached(node, is_state=True)
        if not isinstance(base, Known):
            return None
        kind = next((kind for kind in _SUBSCRIPTED if is_a(base.value, kind)), None)
        # Of other classes it is theirs to say what they give.
        if key is not None and kind is not None and of_class(base.value, "__getitem__") is vars(kind)["__getitem__"]:
            try:
                if kind is not dict or dict.__contains__(base.value, key):  # others may make what is missing
                    return Known(kind.__getitem__(base.value, key))
            except (KeyError, IndexError, TypeError):
                pass
        self._refuse(base, node)
        return None

    def _attribute(self, base: Any, name: str, node: ast.AST) -> Any:
        try:
            return self._resolver.attribute(base, name)
        except UnreadableError as error:
            self._reached(node, is_state=error.is_state)

    # Calls -------------------------------------------------------------------------------------------------------

    def _on_call(self, node: ast.Call) -> Any:
        if _is_super(node) or self._asks_group(node):
            return Super(self._owner, self._function) if _is_super(node) else None
        callee = self.value(node.func)
        target: Any = callee.value if isinstance(callee, Known) else None
        arguments, keywords = self._arguments(node)
        if target is getattr and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return self._attribute(arguments[0], str(node.args[1].value), node)
        if any(target is item for item in _HARMLESS):
            return None
        if is_a(target, MethodType):
            callee = Method(target.__self__, target.__func__)
        if isinstance(callee, Method):
            return self._method(node, callee, arguments, keywords)
        if is_a(target, FunctionType) and not is_library(target):
            return self._reader.call(target, None, arguments, keywords)
        held = [value for value in (*arguments, *keywords.values()) if value is not None and self._all.holds(value)]
        if held:
            self._reached(node, target, is_state=self._is_state(*held))
        self._refuse(None if is_a(target, FunctionType) else callee, node)
        return None

    def _asks_group(self, node: ast.Call) -> bool:
        """Whether a call is that of a parameter group for something beside its parameters, such as its rate."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("get", "setdefault", "pop"):
            return False
        if not node.args or not isinstance(key := node.args[0], ast.Constant) or key.value == "params":
            return False
        base = self.value(node.func.value)
        for item in node.args[1:] if isinstance(base, Groups) and base.is_one else ():
            self._plainly(item)
        return isinstance(base, Groups) and base.is_one

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """What is known of a call's arguments, those handed on as a list or a dictionary among them."""
        arguments: list[Any] = []
        for item in node.args:
            found = self.value(item.value if isinstance(item, ast.Starred) else item)
            handed = _plain(found)
            is_handed = isinstance(item, ast.Starred) and is_a(handed, (list, tuple))
            arguments += [Known(value) for _, value in entries(handed)] if is_handed else [found]
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            found = self.value(keyword.value)
            handed = _plain(found)
            if keyword.arg is None and is_a(handed, dict):
                keywords |= {key: Known(value) for key, value in entries(handed) if type(key) is str}
            else:
                keywords[str(keyword.arg)] = found
        return arguments, keywords

    def _method(self, node: ast.Call, callee: Method, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        owner, function = callee.owner, callee.function
        name = _name_of(function)
        if code_of(function) is not None and not is_library(function):
            return self._reader.call(function, owner, arguments, keywords)
        is_above = isinstance(node.func, ast.Attribute) and _is_super(node.func.value)
        is_modules = is_a(owner, nn.Module) and self._all.holds(owner)
        if (is_above and (is_lightnings(function) or owner is None)) or (is_modules and name == "clip_gradients"):
            return None
        if is_modules and name == "optimizers":
            every = self._all.optimizers
            return Known(every[0] if len(every) == 1 else every)
        held = [value for value in (*arguments, *keywords.values()) if value is not None and self._all.holds(value)]
        # Of learning-rate schedules what is a library's sets rates.
        is_known = is_a(owner, LRScheduler) or (is_above and name == "zero_grad" and self._all.is_optimizer(owner))
        is_away = self._all.holds(owner) and not is_known
        if held or (name not in MODULE_METHODS if is_modules else is_away):
            self._reached(node, function, is_state=self._is_state(*held))
        return None


def _name_of(function: Any) -> str:
    return str(function.__name__) if is_a(function, ROUTINES) else type(function).__name__


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


# By what names code that runs while a batch is trained gets at gradients, or at an optimizer's state.


_MOST_READ = 400

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

_MOST_CALLS, _INSIDE = 4, 2
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
        if (found := gradients_read_in(start, wanted)) is not None:
            return what, *found
    return None


def gradients_read_in(start: list[Code], wanted: frozenset[str] = _OF_GRADIENTS) -> tuple[str, str] | None:
    """The first name by which code, and what it calls by name, gets at gradients, and where; None if by none."""
    # Of installed packages only what the user's code calls is read.
    for number, (code, _, _) in enumerate(reached(start, from_making=True)):
        attributes = {name for each in codes_in(code) for name in each.co_names if name != "grad" or _has_grad(each)}
        if found := sorted(attributes & wanted):
            return found[0], f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"
        if number == _MOST_READ:
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


def uses_state(start: list[Code]) -> bool:
    """Whether code, or what it calls by name, gets at an optimizer's state."""
    return any(
        following.argval in _OF_STATE
        and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and (before.argval != "trainer" if following.argval == "state" else "optim" in str(before.argval))
        for item in reached(start, depth=_MOST_CALLS, inside=_INSIDE)
        for each in codes_in(item.code)
        for before, following in pairwise(filter(_is_step, dis.get_instructions(each)))
    )


def _is_step(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("LOAD") and instruction.opname != "LOAD_CONST"


def mentions_gradients(function: Any, owner: Any = None) -> bool:
    """Whether code, or what it calls by name, has to do with gradients' values; True where it is too much to read."""
    return words_of_gradients((*users_layers(function), unwrapped(function)), owner)


def words_of_gradients(functions: Iterable[Any], owner: Any) -> bool:
    """The same of the code of functions themselves, without what they are around."""
    for function in functions:
        if is_a(function, FunctionType):
            start = Code.of(function, () if owner is None else (owner,))
            depth = _INSIDE if is_installed(start.code) else _MOST_CALLS
            for number, item in enumerate(reached([start], depth=depth, inside=_INSIDE)):
                words = {name for name in names_in(item.code) if _WORD in name.lower()}
                if words - _NO_GRADIENTS or number == _MOST_READ:
                    return True
    return False
