"""What a proof leaves for training: how parts compute, how their results are put together, and what to look out for."""

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import gcd
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.errors import TraceError
from lightning_mist.runtime.cutting.tape import (
    BATCH,
    Computed,
    Fixed,
    Number,
    Read,
    Ref,
    Rows,
    Slice,
    Tape,
    TapeEntry,
    UncuttableError,
    Values,
    ancestors,
    leaves_in,
    rebuilt,
    refs_of,
)
from lightning_mist.tensors import batch_tensors

# How a value of a whole batch follows from those of its parts: seen from values, or ruled by what a call does.


Way = str
"""``"same"``: equal for the whole and all parts. ``"mean"``: the mean of those of the parts, weighted by their rows.
``"sum"``, ``"max"``, ``"min"``: that of theirs. ``"rows D K"``: their concatenation along dimension D, of which K
repetitions of the rows lie behind one another. ``"rows D K L"``: the same, but each part's last L are the next part's
first."""

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


def ways(
    whole: Tensor, parts: Sequence[Tensor], rows: Sequence[int], tolerance: float | None = None, lap: int | None = None
) -> set[Way]:
    """All ways in which a whole batch's value may follow from those of its parts.

    Args:
        tolerance: Largest relative difference; by default that of the element type.
        lap: As in :class:`CutRules`.
    """
    if whole.layout is not torch.strided or any(part.dtype != whole.dtype for part in parts):
        return set()
    if whole.dtype.is_complex:
        whole, parts = torch.view_as_real(whole), [torch.view_as_real(part) for part in parts]
    limit = tolerance_of(whole.dtype) if tolerance is None else tolerance
    is_alike = all(part.shape == whole.shape for part in parts)
    return _along_rows(whole, parts, limit, lap) | (_of_equal_shapes(whole, parts, rows, limit) if is_alike else set())


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


def _along_rows(whole: Tensor, parts: Sequence[Tensor], limit: float, lap: int | None) -> set[Way]:
    found: set[Way] = set()
    for dim in range(whole.dim()):
        sizes = [part.shape[dim] if part.dim() == whole.dim() else -1 for part in parts]
        others = [tuple(tensor.shape[:dim]) + tuple(tensor.shape[dim + 1 :]) for tensor in (whole, *parts)]
        more, common = sum(sizes) - whole.shape[dim], gcd(*sizes)
        if any(other != others[0] for other in others):
            continue
        # Labels that are padded before they are shifted overlap by one more.
        laps = (0,) if more == 0 else (lap, lap + 1) if lap else ()
        for outer in (number for number in range(1, max(1, min(common, 4096)) + 1) if common % number == 0):
            each = next((each for each in laps if more == outer * each * (len(parts) - 1)), None)
            way = f"rows {dim} {outer} {each}".removesuffix(" 0")
            if each is not None and is_close(joined([part.detach() for part in parts], way), whole, limit):
                found.add(way)
                if lap is None:  # of rows the simplest will do
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
        found = {way for way in seen if way.startswith("rows")}
        # Where values are all alike they lie in many ways: in those of what they are made of.
        is_clear = len({way.split()[1] for way in found}) == len(found)
        return found if is_clear else found.intersection(set[Way]().union(*operands)) or found
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


def joined(parts: Sequence[Tensor], way: Way) -> Tensor:
    """The whole from its parts along its rows."""
    dim, outer, lap = _places(way)
    pieces = [_apart(part, dim, outer) for part in parts]
    pieces = [*(piece.narrow(dim + 1, 0, piece.shape[dim + 1] - lap) for piece in pieces[:-1]), pieces[-1]]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)


def _places(way: Way) -> tuple[int, int, int]:
    """The dimension that has rows, their repetitions in it, and how many are those of the next part."""
    dim, outer, *lap = map(int, way.split()[1:])
    return dim, outer, sum(lap)


def cut(whole: Tensor, way: Way, first: float, end: float) -> Tensor:
    """A part of a value along its rows: from one share of the whole to another."""
    dim, outer, _ = _places(way)
    size = whole.shape[dim] // outer
    low, high = round(size * first), round(size * end)
    if outer == 1:
        return whole.narrow(dim, low, high - low)
    return _apart(whole, dim, outer).narrow(dim + 1, low, high - low).flatten(dim, dim + 1)


def split_like(whole: Tensor, way: Way, parts: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of another value of the whole's form that stand where the parts stood."""
    dim, outer, lap = _places(way)
    sizes, every = [part.shape[dim] // outer for part in parts], _apart(whole, dim, outer)
    ends = accumulate(size - lap for size in sizes)
    places = ((end + lap - size, size) for end, size in zip(ends, sizes, strict=True))
    return [every.narrow(dim + 1, *place).flatten(dim, dim + 1) for place in places]


def _apart(tensor: Tensor, dim: int, outer: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], outer, -1, *tensor.shape[dim + 1 :])


# What a part of a batch must compute differently for the parts to add up to the whole.


CLASS_LOSSES = frozenset(("cross_entropy", "nll_loss"))
_CLASS_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")

SELECTING = frozenset(("__getitem__", "masked_select", "index_select", "gather", "take", "take_along_dim"))
"""Functions whose result may have as many entries as the batch's values say."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many values a mean is over: the mean of a part is multiplied by its count over that of the whole batch.

    Attributes:
        source: The labels, or what selects values.
        ignored: The label that does not count; None where values are selected.
    """

    source: Ref
    ignored: int | None
    weight: Ref | Fixed | None = None

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The tensors that the count is worked out from."""
        return (self.source, self.weight) if isinstance(self.weight, Ref) else (self.source,)

    def of(self, values: Values) -> Tensor:
        """The count for a batch."""
        source: Tensor = values[self.source]
        if self.ignored is None:
            return source.sum() if source.dtype == torch.bool else torch.tensor(source.numel(), device=source.device)
        kept = source != self.ignored
        if self.weight is None:
            return kept.sum()
        return (values.leaf(self.weight)[source * kept] * kept).sum()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Whole:
    """An argument that depends on the batch alone, and not row by row, is that of the whole, or a piece along a way."""

    path: tuple[Any, ...]
    value: Any
    way: Way | None = None

    def piece(self, whole: Any, first: float, end: float) -> Any:
        """What a part uses of it."""
        return whole if self.way is None else cut(whole, self.way, first, end)


@dataclass(frozen=True, slots=True)
class Over:
    """An argument that adds up over the parts, where means are expected: it is divided by the part's share of rows."""

    path: tuple[Any, ...]


Patch = Count | Whole | Over


def class_count(entry: TapeEntry, tape: Tape) -> Count | None:
    """The count in a mean loss of class labels, if the labels depend on the batch alone."""
    if entry.name not in CLASS_LOSSES or entry.block is not None:
        return None
    given = {**dict(zip(_CLASS_ARGUMENTS, entry.args, strict=False)), **entry.kwargs}
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    target, weight = given.get("target"), given.get("weight")
    if given.get("reduction", "mean") != "mean" or not isinstance(target, Ref) or tape.depends(target) != "data":
        return None
    if isinstance(weight, Ref) and tape.depends(weight) == "parameters":
        return None
    if isinstance(weight, Fixed) and isinstance(weight.tensor, nn.Parameter):
        return None  # other stages may not have it
    ignored = given.get("ignore_index", -100)
    return Count(target, ignored, weight) if isinstance(ignored, int) else None


def selections(refs: Sequence[Ref], tape: Tape) -> list[Count]:
    """The counts of selections by the batch's values among what makes some tensors, the nearest first."""
    found = []
    for earlier in reversed(ancestors(tape, refs)):
        if earlier.name not in SELECTING or earlier.block is not None:
            continue
        index = [leaf for _, leaf in leaves_in((earlier.args[1:], earlier.kwargs)) if isinstance(leaf, Ref)]
        found += [Count(ref, None) for ref in index[:1] if tape.depends(ref) == "data"]
    return list(dict.fromkeys(found))


def scaled(mean: Tensor, own: Tensor, whole: Tensor) -> Tensor:
    """A part's mean as its summand of the whole batch's mean. Nothing counts where a part has nothing to count."""
    factor = own.double() / whole.double()
    return torch.where(own > 0, mean, mean.new_zeros(())) * factor.to(mean.dtype)


def shape_way(whole: Tensor, parts: Sequence[Tensor]) -> Way | None:
    """Along which dimension the shapes of parts add up to that of the whole; None if none does, or several do."""
    found = [
        dim
        for dim in range(whole.dim())
        if all(part.dim() == whole.dim() for part in parts)
        and sum(part.shape[dim] for part in parts) == whole.shape[dim]
        and all(
            part.shape[other] == whole.shape[other] for part in parts for other in range(whole.dim()) if other != dim
        )
    ]
    return f"rows {found[0]} 1" if len(found) == 1 else None


ResultKey = tuple[Hashable, ...]
"""``("loss",)``, ``("extra", name, ...)`` or ``("log", name, occurrence)``."""


ROWS = ("rows", "rows")
"""Stands for a slice by the number of a batch's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A call whose part of a batch computes something else."""

    key: tuple[Hashable, ...]
    patches: tuple[Patch, ...]
    line: str


Form = tuple[tuple[tuple[Any, Any], ...], tuple[Way | None, ...]]
"""What a call makes, by leaf, of what it is given of values that are put together from rows; see :func:`given_to`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRules:
    """How batches are cut.

    Attributes:
        slice: Works out what they need from a batch; None if they need nothing.
        seen: The ways in which each result of a batch may follow from those of its parts.
        known: Functions that may look across rows, with the places where they were seen.
        forms: What calls make of values put together from rows: by call, and all of them that are not mended by place.
        traced: Which of these values a result is.
        slices: From where to where first dimensions were sliced, where that leaves rows out or goes by their number.
        has_dropout: Whether parts draw other masks of dropout than the whole batch would.
        whole_tail: Why what runs behind the last layer has to take all rows of a part at once; empty if some of them
            after others will do.
        lap: Of batches that are cut along tokens behind the last layer: how many of the next part's each part has as
            well, since labels are shifted. None if they are cut along rows.
        is_of_one: Whether that was seen of one row only, so that several may be put together otherwise.
        tokens: How chunks of tokens of a batch, or of its parts, compute behind the last layer, if that is proved.
    """

    sites: tuple[Site, ...] = ()
    slice: Slice | None = None
    seen: Mapping[ResultKey, frozenset[Way]] = field(default_factory=dict)
    results: Mapping[ResultKey, Way] = field(default_factory=dict)
    leaves: int = 0
    known: frozenset[Hashable] = frozenset()
    forms: Mapping[Hashable, tuple[Form, ...]] = field(default_factory=dict)
    traced: Mapping[ResultKey, Way] = field(default_factory=dict)
    slices: tuple[tuple[Any, Any], ...] = ()
    has_dropout: bool = False
    whole_tail: str = ""
    lap: int | None = None
    is_of_one: bool = False
    tokens: "CutRules | None" = None

    @property
    def site_text(self) -> str:
        """The calls that compute something else as text, equal on ranks that found the same."""
        return repr([(site.key, sorted(_patch_text(patch) for patch in site.patches)) for site in self.sites])

    def bound_to(self, module: nn.Module) -> "CutRules":
        """The rules for the module that trains; they may have been found on a copy of it."""
        sites = tuple(with_weights(site, lambda weight: bound_values(weight, module)) for site in self.sites)
        if self.slice is None:
            return replace(self, sites=sites)
        entries = []
        for entry in self.slice.entries:
            args, kwargs = bound_values((entry.args, entry.kwargs), module)
            entries.append(replace(entry, args=args, kwargs=kwargs))
        return replace(self, sites=sites, slice=Slice(entries, self.slice.device))

    def measure(self, batch: Any, rows: int) -> Values | None:
        """What the sites need from a batch.

        Raises:
            TraceError: If the batch is not of the form that was looked at.
        """
        if self.slice is None:
            return None
        leaves = batch_tensors(batch)
        if len(leaves) != self.leaves:
            raise TraceError(
                f"a batch has {len(leaves)} tensors, and that which was looked at when the plan was made had "
                f"{self.leaves}: what its parts count cannot be known. Use a plan that does not cut batches: "
                "microbatch_size as large as the batch"
            )
        return self.slice.run(leaves, rows)


def with_weights(site: Site, change: Callable[[Any], Any]) -> Site:
    """A site with other weights in what it counts."""
    patches = (replace(p, weight=change(p.weight)) if isinstance(p, Count) else p for p in site.patches)
    return replace(site, patches=tuple(patches))


def given_to(args: Any, kwargs: Any, way_of: Callable[[Any], Way | None]) -> tuple[tuple[Any, Any], ...]:
    """How those arguments of a call follow that are put together from rows, by path, and how it puts rows together."""
    found = ((path, leaf if path == (1, "reduction") else way_of(leaf)) for path, leaf in leaves_in((args, kwargs)))
    return tuple((path, way) for path, way in found if way not in (None, "none"))


def _patch_text(patch: Patch) -> str:
    if isinstance(patch, Count):
        return f"count {patch.ignored}"
    if isinstance(patch, Over):
        return f"over {patch.path}"
    return f"whole {patch.path} {patch.way}"


def needed(sites: Sequence[Site]) -> list[Any]:
    """The tensors that sites need from a whole batch."""
    found: dict[Any, None] = {}
    for site in sites:
        for patch in site.patches:
            if isinstance(patch, Count):
                found.update(dict.fromkeys(patch.refs))
            elif isinstance(patch, Whole) and isinstance(patch.value, Ref):
                found[patch.value] = None
            elif isinstance(patch, Whole) and isinstance(patch.value, Number):
                found.update(dict.fromkeys(refs_of(patch.value.origin)))
    return list(found)


# Calls of torch functions that can be taken to another process, where the same module is.


@dataclass(frozen=True, slots=True)
class Named:
    """A buffer of the module."""

    name: str


def portable_entry(entry: TapeEntry, module: nn.Module) -> TapeEntry:
    """A call whose function and tensors another process can have: the module's buffers by their names.

    Raises:
        UncuttableError: If the function cannot be found by its name.
    """
    function, can_be_found = entry.function, False
    if getattr(function, "__name__", "") == "__get__":
        function, can_be_found = attrgetter(entry.name), True
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        can_be_found |= entry.block is None and pickle.loads(pickle.dumps(function)) == function
    if not can_be_found:
        raise UncuttableError(
            f"what the loss counts is worked out by {entry.name} at {entry.line}, which is not one of torch's functions"
        )
    args, kwargs = portable_values((entry.args, entry.kwargs), module)
    return replace(entry, function=function, args=args, kwargs=kwargs, read=None)


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
        for ref in (Ref(BATCH, leaf) for leaf in range(leaves)):
            pairs = list(zip(whole[ref].shape, part[ref].shape, strict=True))
            if sizes in pairs:
                return Read("size", ref, pairs.index(sizes))
        if sizes[0] == sizes[1]:
            return sizes[0]
        return (
            Rows(sizes[0] // whole.rows)
            if tape.lap is None and sizes[0] * part.rows == sizes[1] * whole.rows
            else origin
        )

    def replaced(_: tuple[Any, ...], leaf: Any) -> Any:
        return Number(by_batch(leaf.origin)) if isinstance(leaf, Number) else leaf

    for entry in tape.entries:
        if entry.depends != "parameters":
            entry.args, entry.kwargs = rebuilt((entry.args, entry.kwargs), replaced)
