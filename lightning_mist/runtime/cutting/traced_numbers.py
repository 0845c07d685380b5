"""Python numbers that remember which tensors they were read from, so that they can be worked out for other batches."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a recorded step.

    Attributes:
        entry: Position of the call that made it, -1 for the tensors of the batch.
        leaf: Which of that call's tensors, or of the batch's.
    """

    entry: int
    leaf: int


BATCH = -1


@dataclass(frozen=True, slots=True)
class Read:
    """A number read from a tensor: ``"item"``, ``"numel"``, or a size with its dimension."""

    what: str
    ref: Ref
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """A number that is a multiple of the rows of the batch."""

    factor: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A number made of others."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


Origin = Read | Rows | Computed


class TracedInt(int):
    """An integer with its origin."""

    origin: Origin

    def __new__(cls, value: int, origin: Origin) -> "TracedInt":
        """The integer."""
        number = super().__new__(cls, value)
        number.origin = origin
        return number


class TracedFloat(float):
    """A real number with its origin."""

    origin: Origin

    def __new__(cls, value: float, origin: Origin) -> "TracedFloat":
        """The number."""
        number = super().__new__(cls, value)
        number.origin = origin
        return number


TRACED = (TracedInt, TracedFloat)


def traced(value: Any, origin: Origin) -> Any:
    """A number with its origin; anything else, truth values too, as it is."""
    if type(value) is int:
        return TracedInt(value, origin)
    return TracedFloat(value, origin) if type(value) is float else value


def plain(value: Any) -> Any:
    """A number without its origin."""
    if isinstance(value, TracedInt):
        return int(value)
    return float(value) if isinstance(value, TracedFloat) else value


def origin_of(value: Any) -> Any:
    """Where a number comes from; a number that comes from nowhere is its own origin."""
    return value.origin if isinstance(value, TRACED) else value


def goes_by_values(origin: Any) -> bool:
    """Whether a number goes by what tensors hold, and not by their sizes alone."""
    if isinstance(origin, Read):
        return origin.what == "item"
    return any(goes_by_values(operand) for operand in getattr(origin, "operands", ()))


def refs_of(origin: Any) -> tuple[Ref, ...]:
    """The tensors that a number was read from."""
    if isinstance(origin, Read):
        return (origin.ref,)
    if isinstance(origin, Computed):
        return tuple(ref for operand in origin.operands for ref in refs_of(operand))
    return ()


def number_of(origin: Any, tensor_of: Callable[[Ref], Any], rows: int) -> Any:
    """A number for another batch, from its tensors and its rows."""
    if isinstance(origin, Read):
        tensor = tensor_of(origin.ref)
        if origin.what == "item":
            return tensor.item()
        return tensor.numel() if origin.what == "numel" else tensor.shape[origin.dim]
    if isinstance(origin, Rows):
        return origin.factor * rows
    if isinstance(origin, Computed):
        return origin.function(*(number_of(operand, tensor_of, rows) for operand in origin.operands))
    return origin


def _with_arithmetic(kind: Any, base: type) -> None:
    def overloaded(name: str, function: Callable[..., Any], is_reversed: bool) -> None:
        original = getattr(base, name)

        def method(self: Any, *others: Any) -> Any:
            result = original(self, *others)
            if result is NotImplemented:
                return result
            operands = tuple(origin_of(item) for item in (self, *others))
            return traced(plain(result), Computed(function, operands[::-1] if is_reversed else operands))

        setattr(kind, name, method)

    for stem in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
        overloaded(f"__{stem}__", getattr(operator, stem), False)
        overloaded(f"__r{stem}__", getattr(operator, stem), True)
    overloaded("__neg__", operator.neg, False)
    overloaded("__pow__", operator.pow, False)


for _kind, _base in ((TracedInt, int), (TracedFloat, float)):
    _with_arithmetic(_kind, _base)
