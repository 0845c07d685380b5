"""Calls of torch functions that can be taken to another process, where the same module is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mist.runtime.cutting.arguments import rebuilt
from lightning_mist.runtime.cutting.tape import Entry, Fixed, Number, Tape
from lightning_mist.runtime.cutting.tape_replay import UncuttableError, Values
from lightning_mist.runtime.cutting.traced_numbers import BATCH, Computed, Read, Ref, Rows

_SPACES: tuple[Any, ...] = (Tensor, torch, F, torch._C._nn, torch.special, torch.linalg)


class Portable:
    """A torch function by its name.

    Args:
        space: Where it is found: the position of a namespace, or -1 for an attribute of tensors.
    """

    def __init__(self, space: int, name: str) -> None:
        self._space, self._name = space, name

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if self._space < 0:
            return getattr(Tensor, self._name).__get__  # type: ignore[no-any-return]
        return getattr(_SPACES[self._space], self._name)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Portable, (self._space, self._name)


@dataclass(frozen=True, slots=True)
class Named:
    """A buffer of the module."""

    name: str


def portable_entry(entry: Entry, module: nn.Module) -> Entry:
    """A call with its function and the module's buffers by their names.

    Raises:
        UncuttableError: If the function has no name.
    """
    args, kwargs = portable_values((entry.args, entry.kwargs), module)
    return replace(entry, function=_portable(entry), args=args, kwargs=kwargs, read=None)


def _portable(entry: Entry) -> Portable:
    function, name = entry.function, getattr(entry.function, "__name__", "")
    if name == "__get__":
        return Portable(-1, entry.name)
    for position, space in enumerate(_SPACES):
        if getattr(space, name, None) == function:
            return Portable(position, name)
    raise UncuttableError(
        f"what the loss counts is worked out by {entry.name} at {entry.line}, which is not one of torch's functions"
    )


def portable_values(value: Any, module: nn.Module) -> Any:
    """A nesting with the module's buffers by their names."""
    names = {id(buffer): name for name, buffer in module.named_buffers()}

    def replaced(_: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, Fixed):
            return Named(names[id(leaf.tensor)]) if id(leaf.tensor) in names else Fixed(leaf.tensor.detach())
        return leaf

    return rebuilt(value, replaced)


def bound_values(value: Any, module: nn.Module) -> Any:
    """A nesting with the module's own buffers in the place of their names."""
    return rebuilt(value, lambda _, leaf: Fixed(module.get_buffer(leaf.name)) if isinstance(leaf, Named) else leaf)


def sizes_by_batch(tape: Tape, whole: Values, part: Values, leaves: int) -> None:
    """Read sizes from the batch that calls on the batch alone read from tensors which depend on parameters."""

    def by_batch(origin: Any) -> Any:
        if isinstance(origin, Computed):
            return Computed(origin.function, tuple(by_batch(operand) for operand in origin.operands))
        is_size = isinstance(origin, Read) and origin.what == "size"
        if not is_size or tape.depends(origin.ref) != "parameters" or origin.ref not in whole:
            return origin
        sizes = whole.number(origin), part.number(origin)
        if sizes[0] != sizes[1]:
            return Rows(sizes[0] // whole.rows) if sizes[0] * part.rows == sizes[1] * whole.rows else origin
        for leaf in range(leaves):
            shape = whole[Ref(BATCH, leaf)].shape
            found = next((dim for dim in range(1, len(shape)) if shape[dim] == sizes[0]), None)
            if found is not None:
                return Read("size", Ref(BATCH, leaf), found)
        return sizes[0]

    def replaced(_: tuple[Any, ...], leaf: Any) -> Any:
        return Number(by_batch(leaf.origin)) if isinstance(leaf, Number) else leaf

    for entry in tape.entries:
        if entry.depends != "parameters":
            entry.args, entry.kwargs = rebuilt((entry.args, entry.kwargs), replaced)
