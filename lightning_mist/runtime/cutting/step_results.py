"""What a step gives besides its loss, and how that of a whole batch follows from that of its parts."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import torch
from torch import Tensor

from lightning_mist.runtime.cutting.combination import SIMPLE, Way, is_close, joined, tolerance_of
from lightning_mist.runtime.cutting.follow import Findings
from lightning_mist.runtime.cutting.traced_numbers import TRACED, Origin, Ref, plain, refs_of

LIST = "list"
"""A list with an entry for every row: those of the parts, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One value that a step returned or logged.

    Attributes:
        key: ``("extra", name, ...)``, ``("log", name, occurrence)`` or ``("metric", method, occurrence, argument)``.
        origin: The tensor of the recorded step that it is, or what it was computed from.
    """

    key: tuple[Hashable, ...]
    value: Any
    origin: Ref | Origin | None = None

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The tensors that it goes by."""
        return (self.origin,) if isinstance(self.origin, Ref) else refs_of(self.origin)

    @property
    def text(self) -> str:
        """The result, for people."""
        kind, name, *_ = self.key
        if kind == "metric":
            return f"what the step gives metric {name}"
        return f"self.log({name!r})" if kind == "log" else f"the entry {name!r} of what training_step returns"

    def located(self, ref_of: Callable[[Any], Ref | None]) -> "Result":
        """The result with the tensor that it comes from."""
        if isinstance(self.value, Tensor):
            return replace(self, origin=ref_of(self.value))
        if isinstance(self.value, TRACED):
            return replace(self, value=plain(self.value), origin=self.value.origin)
        return self


def leaves_of_result(key: tuple[Hashable, ...], value: Any) -> Iterator[Result]:
    """The leaves of something that a step returned."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves_of_result((*key, name), item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, dict, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from leaves_of_result((*key, index), item)
    else:
        yield Result(key=key, value=value)


def read_results(
    whole: Sequence[Result], fewer: Sequence[Result], reads: Mapping[tuple[Any, Any], Ref]
) -> list[Result]:
    """Results with the tensors that plain numbers among them were read from.

    Args:
        reads: For pairs of numbers that were read, the tensor that they are from.
    """
    others = {result.key: result.value for result in fewer}
    found = []
    for result in whole:
        pair = (result.value, others.get(result.key))
        is_number = all(type(value) in (int, float) for value in pair)
        ref = reads.get(pair) if is_number and result.origin is None else None
        found.append(replace(result, origin=ref) if ref is not None else result)
    return found


def result_ways(
    whole: Sequence[Result], fewer: Sequence[Result], found: Findings, rows: tuple[int, int]
) -> dict[tuple[Hashable, ...], frozenset[Way]] | str:
    """All ways in which every result of a batch may follow from those of its parts, or what does not."""
    others = {result.key: result for result in fewer}
    if len(others) != len(whole) or any(result.key not in others for result in whole):
        return "the step returns or logs other things for other rows"
    ways: dict[tuple[Hashable, ...], frozenset[Way]] = {}
    for result in whole:
        why = next((found.spoilt[ref] for ref in result.refs if ref in found.spoilt), None)
        if result.origin is None:
            ways[result.key] = frozenset(_of_values(result.value, others[result.key].value, rows))
        else:
            ways[result.key] = frozenset(found.ways.get(result.origin, ()))
        if why is not None or not ways[result.key]:
            why = why or "it does not follow from those of parts as a mean or a sum"
            return f"{result.text} cannot be put together from parts of a batch: {why}"
    return ways


def best_way(known: AbstractSet[Way]) -> Way | None:
    """The way to go by among those that were seen: where all parts were equal nothing else may pass for it."""
    simple = [way for way in SIMPLE if way in known]
    return simple[0] if simple else min(known, default=None)


def _of_values(value: Any, other: Any, rows: tuple[int, int]) -> set[Way]:
    """How a value that goes by no tensor that was followed goes by the rows."""
    if alike(value, other):
        return {"same"}
    if isinstance(value, (list, tuple)) and isinstance(other, type(value)):
        is_list = len(value) == rows[0] and len(other) == rows[1] and list(value[: rows[1]]) == list(other)
        return {LIST} if is_list else set()
    is_number = type(value) in (int, float) and type(other) is type(value)
    return {"sum"} if is_number and value * rows[1] == other * rows[0] else set()


def alike(value: Any, other: Any) -> bool:
    """Whether two results are the same, up to rounding."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return is_close(other, value, 10 * tolerance_of(value.dtype))
    if isinstance(value, float) and isinstance(other, float) and isnan(value) and isnan(other):
        return True
    return value is other or (type(value) is type(other) and bool(value == other))


def together(key: tuple[Hashable, ...], values: Sequence[Any], weights: Sequence[float], way: Way) -> Any:
    """A batch's result from those of its parts.

    Args:
        weights: Shares of the rows that the parts have.

    Raises:
        ValueError: If it was the same for all parts when the batch was looked at, and is not now.
    """
    first = values[0]
    if way == LIST:
        return type(first)([item for value in values for item in value])
    if way.startswith("rows"):
        _, dim, outer = way.split()
        return joined(list(values), int(dim), int(outer))
    if way == "same":
        if not all(alike(value, first) for value in values):
            raise ValueError(f"{key}: {first!r} for one part of a batch and {values[-1]!r} for another")
        return first
    return _reduced(values, weights, way)


def _reduced(values: Sequence[Any], weights: Sequence[float], way: Way) -> Any:
    if way == "sum":
        return sum(values[1:], values[0])
    if way in ("max", "min"):
        is_tensor = isinstance(values[0], Tensor)
        stacked = torch.stack([torch.as_tensor(value) for value in values])
        result = stacked.amax(0) if way == "max" else stacked.amin(0)
        return result if is_tensor else result.item()
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))
