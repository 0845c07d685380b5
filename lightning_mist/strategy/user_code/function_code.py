"""The source of functions, and what can be told of those without."""

import ast
import dis
import linecache
import types
from functools import lru_cache


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
