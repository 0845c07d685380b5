"""How a value of a whole batch follows from those of its parts: seen from values, or ruled by what a call does."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import gcd

import torch
from torch import Tensor

Way = str
"""``"same"``: equal for the whole and all parts. ``"mean"``: the mean of those of the parts, weighted by their rows.
``"sum"``, ``"max"``, ``"min"``: that of theirs. ``"rows D K"``: their concatenation along dimension D, of which K
repetitions of the rows lie behind one another."""

SIMPLE = ("same", "mean", "sum", "max", "min")

KEEPING = frozenset(
    (
        *("detach", "clone", "item", "float", "to", "double", "cpu", "cuda", "contiguous", "type", "half", "bfloat16"),
        *("data", "view", "view_as", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "expand_as", "type_as"),
        *("T", "t", "transpose", "permute", "select", "narrow", "split", "chunk", "unbind", "__getitem__", "repeat"),
    )
)
"""Functions that change nothing about what their first argument is."""

_FACTORIES = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"))
"""Functions that take sizes, types and devices of tensors, and no values."""

SHIFTS = frozenset(("add", "add_", "sub", "sub_", "__rsub__", "rsub", "masked_fill", "where"))
_ADDING = frozenset(("neg", "stack", "cat", "concat", "hstack", "sum", "mean", "cumsum", "__setitem__"))
"""Functions that are linear in all of their tensors together; in the former in numbers too."""

_SCALING = frozenset(
    (
        *("mul", "mul_", "div", "div_", "truediv", "true_divide", "divide", "multiply", "matmul", "__rmatmul__", "mm"),
        *("bmm", "mv", "dot", "einsum", "tensordot"),
    )
)
_AFFINE = frozenset(("linear", "addmm", "addmv", "addr", "baddbmm", "addbmm", "addcmul", "lerp"))
"""Functions that are linear in each of their tensors, but for divisors, and those that add another."""

_REDUCING = {"sum": "sum", "nansum": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min", "amin": "min"}

Operand = tuple[tuple[object, ...], AbstractSet[Way]]
"""An argument by its path, and how it follows from those of the parts, with ``"sizes"`` where it is a size."""

_FIRST = ((0, 0), (1, "input"))
COUNT: AbstractSet[Way] = frozenset(("sum",))
"""How a number that goes with the rows follows: that of a part is its share of the whole's."""

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
    is_alike = all(part.shape == whole.shape for part in parts)
    return _along_rows(whole, parts, limit) | (_of_equal_shapes(whole, parts, rows, limit) if is_alike else set())


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
        common = gcd(*sizes)
        for outer in (1, *(number for number in range(2, min(common, 4096) + 1) if common % number == 0)):
            if is_close(joined([part.detach() for part in parts], dim, outer), whole, limit):
                found.add(f"rows {dim} {outer}")
                break
    return found


def row_way(found: AbstractSet[Way]) -> Way | None:
    """The way of a value that has rows; None for others."""
    return min((way for way in found if way.startswith("rows")), default=None)


def following(name: str, seen: AbstractSet[Way], operands: Sequence[Operand]) -> AbstractSet[Way]:
    """The ways, among those that its values showed, in which the result of a call may follow from those of the parts.

    What a call makes of rows is seen. What becomes of sums, means and extremes is ruled by what it does, whatever their
    values are: what is tiny now counts as well. Mixtures with rows follow in no way.
    """
    if name in _FACTORIES:
        return seen
    if name == "where":
        operands = [(path, known) for path, known in operands if path != (0, 0) or "same" not in known]
    joint = [(path, known) for path, known in operands if "same" not in known and row_way(known) is None]
    if not joint:
        return seen & _of_rows(name, seen, [known for _, known in operands])
    if name in KEEPING and joint[0][0] in _FIRST:
        return seen & joint[0][1]
    return set() if any(row_way(known) for _, known in operands) else seen & _of_joint(name, operands, joint)


def _of_rows(name: str, seen: AbstractSet[Way], operands: Sequence[AbstractSet[Way]]) -> AbstractSet[Way]:
    """What a call may make of values that have rows, or that all parts have alike."""
    if all("same" in known for known in operands):
        return seen if any("sizes" in known for known in operands) else {"same"}
    if row_way(seen):
        return {way for way in seen if way.startswith("rows")}
    return {_REDUCING[name]} if name in _REDUCING else set() if name in _AFFINE else seen - {"same"}


def _of_joint(name: str, operands: Sequence[Operand], joint: Sequence[Operand]) -> AbstractSet[Way]:
    """What a call makes of these and of values that all parts have alike."""
    if name in SHIFTS or name in _ADDING:
        means = all({"mean", "same"} & known for _, known in operands)
        return ({"mean"} if means else set()) | ({"sum"} if all("sum" in known for _, known in operands) else set())
    if name in _AFFINE:
        return {"mean"} & joint[0][1] if len(joint) == 1 else set()
    return _scaled("div" in name, joint) if name in _SCALING else set()


def _scaled(is_quotient: bool, joint: Sequence[Operand]) -> AbstractSet[Way]:
    counts = [known for _, known in joint if known is COUNT]
    others = [(path, known) for path, known in joint if known is not COUNT]
    if len(others) != 1 or len(counts) > 1 or (is_quotient and others[0][0] not in _FIRST):
        return COUNT if len(counts) == len(joint) == 1 and not is_quotient else set()
    if not counts:
        return others[0][1] & {"mean", "sum"}
    before, after = ("sum", "mean") if is_quotient else ("mean", "sum")
    return {after} if before in others[0][1] else set()


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
