"""How a run of the user's step is looked at, alike in the trace that plans and in the stages that run.

A value that crosses a cut is named by where it was made, so that every rank finds it in its own run of the step:
as a leaf of a block's output, or as a result of the n-th call of a function at one place of the user's code. Names hold
no paths, so machines may differ in where packages are installed.

Nothing here imports torch: tensors are told apart by what they offer.
"""

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from traceback import walk_stack
from typing import Any

_OUR_FRAMES = ("lightning_mist.", "torch.overrides")
"""Modules whose frames lie between a user's line and the observer of a torch function."""

_SIMPLE = (type(None), bool, int, float, complex, str, bytes)


@contextmanager
def intercepted(blocks: Sequence[Any], wrap: Callable[[int, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, whoever calls a block calls what ``wrap`` made of its position and of what runs it.

    That is its forward, or what ``Module.compile`` has put in place of forward and hooks.
    """
    names = ["_compiled_call_impl" if vars(block).get("_compiled_call_impl") else "forward" for block in blocks]
    own = [vars(block).get(name) for block, name in zip(blocks, names, strict=True)]
    try:
        for position, (block, name) in enumerate(zip(blocks, names, strict=True)):
            vars(block)[name] = wrap(position, _counted(getattr(block, name)))
        yield
    finally:
        for block, name, before in zip(blocks, names, own, strict=True):
            vars(block).pop(name, None)
            if before is not None:
                vars(block)[name] = before


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()


def _counted(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _DEPTH.value += 1
        try:
            return run(*args, **kwargs)
        finally:
            _DEPTH.value -= 1

    return counted


def inside_block() -> bool:
    """Whether this thread is running a block that is intercepted, or recomputes it in backward."""
    return _DEPTH.value > 0


def block_value(position: int, leaf: int) -> Hashable:
    """Name of a leaf of a block's output."""
    return ("block", position, leaf)


def is_block_value(key: Hashable) -> bool:
    """Whether a name needs nothing but the outputs of blocks to be found."""
    return isinstance(key, tuple) and key[0] == "block"


def describe_value(key: Hashable) -> str:
    """The name of a value that crosses a cut, as text for people."""
    if isinstance(key, tuple) and key[0] == "block":
        return f"output {key[2]} of layer {key[1]}"
    if isinstance(key, tuple) and key[0] in ("glue", "inner"):
        kind, region, function, (module, caller, line), *_ = key
        place = f"inside layer {region}" if kind == "inner" else f"after layer {region}"
        return f"result of {function} ({module}:{line}, in {caller}, {'before layer 0' if region < 0 else place})"
    return repr(key)


def occurrence(counts: dict[Hashable, int], *what: Hashable) -> tuple[Hashable, ...]:
    """What tells a call that is happening now from others, alike in every run: ``what``, place and how often before.

    With the position of the block entered last in ``what``, a value cached behind one block does not shift the names
    behind another.
    """
    base = (*what, call_site())
    count = counts.get(base, 0)
    counts[base] = count + 1
    return (*base, count)


def call_site() -> tuple[str, str, int]:
    """Module, function and line that called the torch function being observed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_OUR_FRAMES):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")), frame.f_code.co_name, frame.f_lineno


def user_line(package_prefixes: tuple[str, ...] = ("torch", "lightning_mist", "contextlib")) -> str:
    """File and line of the innermost frame outside of torch and this package, for messages."""
    here = sys._getframe(1)
    packages = ((frame, str(frame.f_globals.get("__name__")).partition(".")[0]) for frame, _ in walk_stack(here))
    frame = next((frame for frame, package in packages if package not in package_prefixes), here)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def leaves_of(value: Any) -> Iterator[Any]:
    """Leaves of nested tuples, lists and dictionaries: the arguments of a torch function."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def results(function: str, args: tuple[Any, ...], output: Any) -> Iterable[Any]:
    """What a torch function made or changed: its output, or the target of an item assignment."""
    return args[:1] if function == "__setitem__" else leaves_of(output)


def call_signature(leaves: Iterable[Any]) -> tuple[Hashable, ...]:
    """What decides the structure of a block's output: shapes and dtypes of tensors, and plain Python values."""
    return tuple(
        (tuple(leaf.shape), str(leaf.dtype), str(leaf.device))
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        else leaf
        if isinstance(leaf, _SIMPLE)
        else type(leaf).__qualname__
        for leaf in leaves
    )


def is_simple(leaf: Any) -> bool:
    """Whether a leaf of an output is a plain value that can be given again."""
    return isinstance(leaf, _SIMPLE) or (
        type(leaf).__module__ == "torch" and type(leaf).__name__ in ("dtype", "device")
    )


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with empty key-value caches of transformers replaced by None.

    Models make such a cache by default even in training, where nothing reads it; a block that is recomputed in backward
    would append to it a second time.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None:
        return args, kwargs

    def keep(value: Any) -> Any:
        return None if isinstance(value, caches.Cache) and not int(value.get_seq_length()) else value

    return tuple(keep(value) for value in args), {name: keep(value) for name, value in kwargs.items()}


def select(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], is_known_mask: Callable[[Any], bool]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An indexing call with known boolean masks replaced by the positions they select, whose number is known too."""
    if name == "masked_select":
        tensor, mask = args
        sizes = zip_longest(reversed(tensor.shape), reversed(mask.shape), fillvalue=1)
        shape = tuple(max(pair) if 0 not in pair else 0 for pair in sizes)[::-1]
        return type(tensor).__getitem__, (tensor.expand(shape), mask.expand(shape).nonzero(as_tuple=True))
    index = args[1]
    if is_known_mask(index):
        index = tuple(index.nonzero(as_tuple=True))
    elif isinstance(index, tuple):
        parts: list[Any] = []
        for item in index:
            parts += item.nonzero(as_tuple=True) if is_known_mask(item) else (item,)
        index = tuple(parts)
    return func, (args[0], index, *args[2:])
