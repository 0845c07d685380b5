"""How a value of a whole batch follows from those of its parts, seen from the values."""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

Way = str
"""``"same"``: equal for the whole and all parts. ``"mean"``: the mean of those of the parts, weighted by their rows.
``"sum"``, ``"max"``, ``"min"``: that of theirs. ``"rows D K"``: their concatenation along dimension D, of which K
repetitions of the rows lie behind one another."""

SIMPLE = ("same", "mean", "sum", "max", "min")

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
_COARSE = 5e-2


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest difference relative to the largest value: some hundred roundings."""
    return _TOLERANCES.get(dtype, _COARSE)


def is_close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether values agree, relative to the largest; exactly where they are no real numbers."""
    if found.shape != wanted.shape:
        return False
    if not wanted.numel():
        return True
    if not wanted.dtype.is_floating_point and not found.dtype.is_floating_point:
        return torch.equal(found.to(wanted.dtype), wanted)
    found, wanted = found.detach().double(), wanted.detach().double()
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(found)):
        return False
    found, wanted = found.where(finite, 0.0), wanted.where(finite, 0.0)
    scale = max(float(wanted.abs().max()), 1e-30)
    return float((found - wanted).abs().max()) <= tolerance * scale


def ways(whole: Tensor, parts: Sequence[Tensor], rows: Sequence[int], *, tolerance: float | None = None) -> set[Way]:
    """All ways in which a whole batch's value may follow from those of its parts.

    Args:
        tolerance: Largest relative difference; by default that of the element type.
    """
    if whole.layout is not torch.strided or any(part.dtype != whole.dtype for part in parts):
        return set()
    if whole.dtype.is_complex:
        whole, parts = torch.view_as_real(whole), [torch.view_as_real(part) for part in parts]
    limit = tolerance_of(whole.dtype) if tolerance is None else tolerance
    found = set()
    if all(part.shape == whole.shape for part in parts):
        found |= _of_equal_shapes(whole, parts, rows, limit)
    found |= _along_rows(whole, parts, limit)
    return found


def _of_equal_shapes(whole: Tensor, parts: Sequence[Tensor], rows: Sequence[int], limit: float) -> set[Way]:
    found = set()
    if all(is_close(part, whole, limit) for part in parts):
        found.add("same")
    if whole.dtype == torch.bool:
        return found
    stacked = torch.stack([part.detach() for part in parts]).double()
    weights = torch.tensor([row / sum(rows) for row in rows], dtype=torch.float64, device=whole.device)
    mean = (stacked * weights.view(-1, *(1,) * whole.dim())).sum(0)
    choices = {"mean": mean, "sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}
    wanted = whole.detach().double()
    # A sum of opposite numbers is as exact as they are large.
    scale = float(stacked.abs().max()) / max(float(wanted.abs().max()), 1e-30) if whole.numel() else 1.0
    for name, value in choices.items():
        if is_close(value, wanted, limit * max(scale, 1.0) if scale < 1e6 else limit):
            found.add(name)
    return found


def _along_rows(whole: Tensor, parts: Sequence[Tensor], limit: float) -> set[Way]:
    found: set[Way] = set()
    for dim in range(whole.dim()):
        sizes = [part.shape[dim] if part.dim() == whole.dim() else -1 for part in parts]
        others = [tuple(tensor.shape[:dim]) + tuple(tensor.shape[dim + 1 :]) for tensor in (whole, *parts)]
        if sum(sizes) != whole.shape[dim] or any(other != others[0] for other in others):
            continue
        for outer in _divisors(gcd(*sizes)):
            if is_close(joined([part.detach() for part in parts], dim, outer), whole, limit):
                found.add(f"rows {dim} {outer}")
                break
    return found


def _divisors(number: int) -> list[int]:
    return [1, *(value for value in range(2, min(number, 4096) + 1) if number % value == 0)]


def joined(parts: Sequence[Tensor], dim: int, outer: int) -> Tensor:
    """The whole from parts along a dimension that repeats the rows so many times."""
    if outer == 1:
        return torch.cat(list(parts), dim)
    return torch.cat([_apart(part, dim, outer) for part in parts], dim + 1).flatten(dim, dim + 1)


def cut(whole: Tensor, way: Way, first: float, end: float) -> Tensor:
    """A part of a value along its rows: from one share of the whole to another."""
    _, dim_text, outer_text = way.split()
    dim, outer = int(dim_text), int(outer_text)
    size = whole.shape[dim] // outer
    low, high = round(size * first), round(size * end)
    if outer == 1:
        return whole.narrow(dim, low, high - low)
    return _apart(whole, dim, outer).narrow(dim + 1, low, high - low).flatten(dim, dim + 1)


def split_like(whole: Tensor, way: Way, parts: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of another value of the whole's form that stand where the parts stood."""
    _, dim_text, outer_text = way.split()
    dim, outer = int(dim_text), int(outer_text)
    sizes = [part.shape[dim] // outer for part in parts]
    pieces = torch.split(_apart(whole, dim, outer), sizes, dim + 1)
    return [piece.flatten(dim, dim + 1) for piece in pieces]


def _apart(tensor: Tensor, dim: int, outer: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], outer, -1, *tensor.shape[dim + 1 :])
