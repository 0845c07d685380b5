"""Running a recorded step on a whole batch and on its parts side by side, and mending parts where they differ.

For every value it is found how that of the whole follows from those of the parts: row by row, as a mean, or as a sum;
see :func:`.rules.following`. Where nothing holds, three repairs are tried; see :mod:`.rules`. A value that
nothing explains spoils all that is made of it, whatever it weighs in the loss now: a term that is tiny, or zero, or
starts later, counts as any other.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isnan
from typing import Any

import torch
from torch import Tensor

from lightning_mist.runtime.cutting.rules import (
    CLASS_LOSSES,
    COUNT,
    SELECTING,
    SHIFTS,
    SIMPLE,
    Count,
    Over,
    Patch,
    Way,
    Whole,
    class_count,
    following,
    is_close,
    joined,
    row_way,
    scaled,
    selections,
    shape_way,
    split_like,
    tolerance_of,
    ways,
)
from lightning_mist.runtime.cutting.tape import (
    BATCH,
    TRACED,
    Computed,
    Number,
    Origin,
    Read,
    Ref,
    Tape,
    TapeEntry,
    Values,
    ancestors,
    goes_by_values,
    leaves_in,
    plain,
    refs_of,
    run_entry,
    sources,
)
from lightning_mist.tensors import slice_tokens

_ARITHMETIC = frozenset(
    (
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "truediv", "true_divide", "__rdiv__", "__rsub__"),
        *("rsub", "__rpow__", "pow", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "floor_divide"),
        "__rfloordiv__",
    )
)
"""Functions in which a number is a value and not a size."""

NEITHER = "the values of a batch are not those of its parts, one by one, nor their mean or sum"

ANY = "any values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A batch to follow, how it is cut, and what changes the labels of losses, if anything."""

    name: str
    leaves: Sequence[Tensor]
    rows: tuple[int, ...]
    labels: Callable[[Tensor, int], Tensor] | None = None


@dataclass(slots=True)
class Findings:
    """What is known of a tape.

    Attributes:
        patches: By call, what parts do differently.
        ways: For every tensor that was compared, how that of a whole follows from those of parts.
        spoilt: Tensors that nothing explains, with the call where it began and what is wrong with it.
    """

    patches: dict[int, tuple[Patch, ...]] = field(default_factory=dict)
    ways: dict[Ref | Origin, AbstractSet[Way]] = field(default_factory=dict)
    spoilt: dict[Ref, str] = field(default_factory=dict)

    def add(self, index: int, patch: Patch) -> None:
        """A patch of a call."""
        known = self.patches.get(index, ())
        if patch not in known:
            self.patches[index] = (*known, patch)

    def spoil_unclear(self, tape: Tape, wanted: Sequence[Ref]) -> None:
        """Spoil what goes by a value that may still follow in several ways, as zero does."""
        for item in wanted:
            for entry in ancestors(tape, [item]):
                known = [self.ways.get(ref, set()) for ref in entry.refs if entry.depends == "parameters"]
                if any(len(ways & set(SIMPLE)) > 1 and "same" not in ways for ways in known):
                    self.spoilt.setdefault(item, f"{text_of(entry)}: its values do not tell a mean from a sum")

    def begin(self) -> None:
        """Begin again with what is known to be different, and find out anew which sums stand among means."""
        self.ways.clear()
        self.spoilt.clear()
        kept = {index: tuple(p for p in patches if not isinstance(p, Over)) for index, patches in self.patches.items()}
        self.patches = {index: patches for index, patches in kept.items() if patches}

    @property
    def text(self) -> str:
        """All patches, to see whether they have settled."""
        return repr(sorted(self.patches.items()))


def follow(
    tape: Tape, wanted: Sequence[Ref | Origin], findings: Findings, variant: Variant, tolerance: float | None = None
) -> tuple[Values, list[Values]]:
    """Follow one batch along a tape; all tensors of the whole and of the parts.

    Args:
        wanted: The tensors and numbers that must be explained.
        findings: What is known already; what is found is added.
        tolerance: Largest relative difference of real numbers; None for that of their type.
    """
    side = _Side(tape, findings, variant, tolerance)
    for entry in ancestors(tape, [ref for item in wanted for ref in refs_of(item)]):
        if (count := class_count(entry, tape)) is not None:
            findings.add(entry.index, count)
        side.run(entry)
    for item in wanted:
        if not isinstance(item, Ref) or tape.depends(item) != "parameters":
            side.note(item)
    return side.whole, side.parts


class _Side:
    """One variant's run: the whole and its parts."""

    def __init__(self, tape: Tape, found: Findings, variant: Variant, tolerance: float | None) -> None:
        self._tape, self._found, self._variant, self._tolerance = tape, found, variant, tolerance
        self._is_of_rows, self._lap = tape.lap is None, tape.lap or 0
        leaves, every = variant.leaves, sum(variant.rows)
        places = [(end - rows, end) for rows, end in zip(variant.rows, accumulate(variant.rows), strict=True)]
        self.whole = Values([leaf.clone() for leaf in leaves], every)
        self.parts = [
            Values([leaf.clone() for leaf in leaves_of_part(leaves, first, end, tape.lap)], end - first)
            for first, end in places
        ]
        self._places, self._length = places, every + self._lap
        self._shares = [(first / every, end / every) for first, end in places]
        self._relabelled: set[Ref] = set()
        self._chance = torch.Generator().manual_seed(5)

    def run(self, entry: TapeEntry) -> None:
        """Run one call on the whole and on all parts."""
        # Layers look at tokens together: parts have theirs of what layers make of all.
        is_handed = not self._is_of_rows and entry.depends == "parameters" and entry.index <= self._tape.last
        problem = None if self._is_of_rows else self._tokens_by_number(entry)
        if entry.depends == "parameters" and not is_handed:
            self._relabel(entry)
            problem = self._take_wholes(entry) or problem
            self._take_shares(entry)
        run_entry(entry, self.whole, self._tape.device)
        if is_handed:
            self._hand(entry)
        else:
            self._run_parts(entry)
            self._explain(entry, problem)
        if self._variant.name == ANY:
            for ref in entry.refs:
                self._put_any(ref)

    def _hand(self, entry: TapeEntry) -> None:
        """Give parts their tokens of what is made in front of the end of the layers."""
        for ref in entry.refs:
            value = self.whole[ref]
            short = self._length - value.shape[1] if value.dim() > 1 else -1
            for part, (first, end) in zip(self.parts, self._places, strict=True):
                size = end - first + self._lap - short
                part[ref] = (value.narrow(1, first, size) if 0 <= short <= self._lap else value).clone()
            self._note(ref, self._of(ref))

    def _tokens_by_number(self, entry: TapeEntry) -> str | None:
        """What is wrong with a call that takes so many tokens: what that leaves out of more of them is not seen."""
        if entry.name not in ("__getitem__", "split") or not isinstance(source := entry.args[0], Ref):
            return None
        shapes = [values[source].shape for values in (self.whole, *self.parts)]
        given, *rest = entry.args[1:] or [entry.kwargs.get("split_size")]
        items = [item for item in (given if isinstance(given, tuple) else (given,)) if item is not None]
        if entry.name == "split":
            dim: Any = entry.kwargs.get("dim", rest[0] if rest else 0)
            items = [slice(None)] * (dim % len(shapes[0])) + [slice(given)]
        for place in [at for at, item in enumerate(items) if item is Ellipsis]:
            items[place : place + 1] = [slice(None)] * (len(shapes[0]) - len(items) + 1)
        for item, *sizes in zip(items, *shapes, strict=False):
            ends = (item.start, item.stop) if isinstance(item, slice) and len({*sizes}) > 1 else ()
            if any(type(end) is int and abs(end) > self._lap for end in ends):
                return f"{text_of(entry)} takes tokens by a number that does not follow from how many there are"
        return None

    def _put_any(self, ref: Ref) -> None:
        """Put any values in the place of those with rows: zeros, or what is right nowhere, hide what comes of them."""
        whole, way = self.whole[ref], row_way(self._found.ways.get(ref, set()))
        is_truth = whole.dtype == torch.bool
        is_hidden = self._tape.depends(ref) == "parameters" or not (is_truth or whole.any())
        if way is not None and whole.numel() and is_hidden and (is_truth or whole.dtype.is_floating_point):
            value = torch.rand(whole.shape, generator=self._chance, dtype=torch.float64) * 0.9 + 0.1
            self._replace(ref, way, (value < 0.5 if is_truth else value.to(whole.dtype)).to(whole.device))

    def _relabel(self, entry: TapeEntry) -> None:
        """Put other labels in the place of a loss's, alike for the whole and its parts."""
        if self._variant.labels is None:
            return
        for patch in self._found.patches.get(entry.index, ()):
            if not isinstance(patch, Count) or patch.ignored is None or patch.source in self._relabelled:
                continue
            whole = self.whole[patch.source]
            way = row_way(self._known(patch.source))
            if way is not None and whole.numel():
                self._relabelled.add(patch.source)
                before = [part[patch.source] for part in self.parts]
                self._replace(patch.source, way, self._variant.labels(whole, patch.ignored))
                for part, labels in zip(self.parts, before, strict=True):  # what ends a part's tokens stays ignored
                    part[patch.source].masked_fill_(labels == patch.ignored, patch.ignored)

    def _replace(self, ref: Ref, way: Way, value: Tensor) -> None:
        """Put another value in the place of one, alike for the whole and its parts."""
        pieces = split_like(value, way, [part[ref] for part in self.parts])
        self.whole[ref] = value
        for part, piece in zip(self.parts, pieces, strict=True):
            part[ref] = piece.clone()  # calls may write into it

    def _take_wholes(self, entry: TapeEntry) -> str | None:
        """Make arguments that depend on the batch alone those of the whole; what is wrong with one that cannot be."""
        if entry.name in SELECTING:
            return None  # positions in a part are not those in the whole: what is selected is compared
        patches = self._found.patches.get(entry.index, ())
        counted = {ref for patch in patches if isinstance(patch, Count) for ref in patch.refs}
        for path, leaf in leaves_in((entry.args, entry.kwargs)):
            if isinstance(leaf, Ref) and leaf.entry != BATCH and self._tape.depends(leaf) == "data":
                whole, parts = self.whole[leaf], [part[leaf] for part in self.parts]
                known = self._known(leaf)
                if "same" in known or row_way(known) is not None or leaf in counted:
                    continue
                is_alike = all(part.shape == whole.shape for part in parts)
                way = None if is_alike else shape_way(whole, parts)
                if entry.block is not None or not (is_alike or (way is not None and self._is_of_rows)):
                    return f"{text_of(entry)} uses a value that depends on several rows of the batch in another way"
                self._found.add(entry.index, Whole(path, leaf, way))
            elif isinstance(leaf, Number) and entry.name in _ARITHMETIC and self._is_of_whole(leaf.origin):
                self._found.add(entry.index, Whole(path, leaf))
        return None

    def _is_of_whole(self, origin: Any) -> bool:
        """Whether a number goes by the values of the batch, or in a way of its own by its rows."""
        refs = refs_of(origin)
        found = selections([ref for ref in refs if self._tape.depends(ref) == "data"], self._tape)
        if goes_by_values(origin) or any(self._tape.dtypes[count.source] == torch.bool for count in found):
            return all(self._tape.depends(ref) != "parameters" for ref in refs)
        return not self._by_rows(origin)

    def _by_rows(self, origin: Any) -> AbstractSet[Way]:
        """How a number that goes by no values follows: the same for all, with the rows, or in no way."""
        (first, rows), *others = ((values.number(origin), values.rows) for values in (self.whole, *self.parts))
        if all(number == first for number, _ in others):
            return {"same"}
        return COUNT if all(number * rows == first * its_rows for number, its_rows in others) else set()

    def _run_parts(self, entry: TapeEntry, *extra: Patch) -> None:
        patches = (*self._found.patches.get(entry.index, ()), *extra)
        for part, share in zip(self.parts, self._shares, strict=True):
            self._run_part(entry, part, share, patches)

    def _run_part(self, entry: TapeEntry, part: Values, share: tuple[float, float], patches: Sequence[Patch]) -> None:
        wholes = {p.path: p.piece(self.whole.leaf(p.value), *share) for p in patches if isinstance(p, Whole)}
        sums = {patch.path for patch in patches if isinstance(patch, Over)}

        def change(path: tuple[Any, ...], value: Any) -> Any:
            return wholes[path] if path in wholes else value / (share[1] - share[0]) if path in sums else value

        made = run_entry(entry, part, self._tape.device, change)
        for patch in patches:
            if isinstance(patch, Count):
                part[Ref(entry.index, 0)] = scaled(made[0], patch.of(part), patch.of(self.whole))

    def _ways(self, whole: Tensor, parts: Sequence[Tensor]) -> set[Way]:
        return ways(whole, parts, self._variant.rows, tolerance=self._tolerance, lap=self._tape.lap)

    def _note(self, ref: Ref | Origin, found: AbstractSet[Way]) -> None:
        self._found.ways[ref] = found & self._found.ways.get(ref, found)

    def note(self, item: Ref | Origin) -> None:
        """See how a number, or a tensor that does not depend on parameters, follows from those of the parts."""
        if isinstance(item, Ref):
            self._note(item, self._of(item))
            return
        whole, *parts = (torch.tensor(float(v.number(item)), dtype=torch.float64) for v in (self.whole, *self.parts))
        self._note(item, self._ways(whole, parts) & self._of_number(item))

    # Explaining --------------------------------------------------------------------------------------------------

    def _explain(self, entry: TapeEntry, problem: str | None) -> None:
        spoilt = next((self._found.spoilt[ref] for ref in sources(entry) if ref in self._found.spoilt), problem)
        found = {ref: self._following(entry, ref) for ref in entry.refs}
        is_wanted = spoilt is None and entry.depends == "parameters"
        if is_wanted and not all(known & self._found.ways.get(ref, known) for ref, known in found.items()):
            repaired = self._repaired(entry)
            spoilt, found = (f"{text_of(entry)}: {NEITHER}", found) if repaired is None else (None, repaired)
        for ref, known in found.items():
            if spoilt is not None:
                self._found.spoilt.setdefault(ref, spoilt)
            else:
                self._note(ref, known)

    def _of(self, ref: Ref) -> set[Way]:
        return self._ways(self.whole[ref], [part[ref] for part in self.parts])

    def _known(self, ref: Ref) -> AbstractSet[Way]:
        """How a tensor is known to follow."""
        if ref.entry == BATCH and not self._is_of_rows:
            return self._of(ref) - {"mean", "sum", "max", "min"}
        if ref.entry == BATCH:
            return {"rows 0 1"} if self.whole[ref].dim() else {"same"}
        return self._found.ways.get(ref, set())

    def _of_number(self, origin: Any) -> AbstractSet[Way]:
        """How a number follows, from what it is made of."""
        if isinstance(origin, Read) and origin.what == "item":
            return self._known(origin.ref)
        if isinstance(origin, Computed) and goes_by_values(origin):
            operands = [((0, index), self._of_number(item)) for index, item in enumerate(origin.operands)]
            return following(origin.function.__name__, frozenset(SIMPLE), operands)
        if type(origin) is int and origin == 0:
            return {"same", "mean", "sum"}  # what the function sum begins with
        return self._by_rows(origin)

    def _operands(self, entry: TapeEntry, patches: Sequence[Patch]) -> list[tuple[Any, AbstractSet[Way]]]:
        """What a call computes with."""
        changed = {patch.path: patch for patch in patches if not isinstance(patch, Count)}
        found: list[tuple[Any, AbstractSet[Way]]] = []
        for path, leaf in leaves_in((entry.args, entry.kwargs)):
            patch = changed.get(path)
            if isinstance(patch, Whole):
                found.append((path, {"same"} if patch.way is None else {patch.way}))
            elif isinstance(patch, Over):
                found.append((path, {"mean"}))
            elif isinstance(leaf, Number):
                found.append((path, self._of_number(leaf.origin) if entry.name in _ARITHMETIC else {"same", "sizes"}))
            elif type(leaf) in (int, float) and entry.name in SHIFTS and path != (1, "alpha"):
                found.append((path, self._of_number(leaf)))
            elif isinstance(leaf, Ref):
                known, depends = self._known(leaf), self._tape.depends(leaf)
                # Positions among rows are no values; what is made of them is compared. Those of tokens are counted anew
                # in every part.
                is_value = depends == "parameters" or (depends == "nothing" and not self._is_of_rows)
                if known or is_value or (depends == "data" and entry.name not in SELECTING):
                    found.append((path, known))
        return found

    def _following(self, entry: TapeEntry, ref: Ref, *extra: Patch) -> AbstractSet[Way]:
        seen = self._of(ref)
        return self._may(entry, *extra, seen=seen if self._is_even(entry) else seen - {"mean"})

    def _may(self, entry: TapeEntry, *extra: Patch, seen: AbstractSet[Way] = frozenset(SIMPLE)) -> AbstractSet[Way]:
        """Those of the ways in which what a call makes may follow."""
        patches = (*self._found.patches.get(entry.index, ()), *extra)
        is_summand = any(isinstance(patch, Count) for patch in patches)
        name = "nansum" if is_summand else "floor_divide" if "rounding_mode" in entry.kwargs else entry.name
        return following(name, seen, self._operands(entry, patches))

    def _is_even(self, entry: TapeEntry) -> bool:
        """Whether parts have their rows' share of the entries of what a call uses."""
        used = [ref for ref in sources(entry) if row_way(self._known(ref)) is not None]
        whole, pairs = self.whole, [(part, ref) for part in self.parts for ref in used]
        return all(part[ref].numel() * whole.rows == whole[ref].numel() * part.rows for part, ref in pairs)

    def _repaired(self, entry: TapeEntry) -> dict[Ref, AbstractSet[Way]] | None:
        """How what a mean makes follows if a part counts what was selected of it; None if nothing explains it."""
        has_count = any(isinstance(patch, Count) for patch in self._found.patches.get(entry.index, ()))
        is_mean = entry.name == "mean" or entry.name in CLASS_LOSSES or entry.name.endswith("_loss")
        if entry.block is not None or has_count or not is_mean:
            return None
        for count in selections([*sources(entry)], self._tape):
            self._run_parts(entry, count)
            found = {ref: self._following(entry, ref, count) for ref in entry.refs}
            if all(found.values()):
                self._mend(entry, count)
                return found
        self._run_parts(entry)
        return None

    def _mend(self, entry: TapeEntry, *patches: Patch) -> None:
        for patch in patches:
            self._found.add(entry.index, patch)
        for ref in entry.refs:  # what earlier variants showed was without it
            self._found.ways.pop(ref, None)

    def _take_shares(self, entry: TapeEntry) -> None:
        """Let sums that stand among means, or among what all parts have alike, be over their parts' shares."""
        if entry.block is not None or self._may(entry):
            return
        sums = [
            Over(path)
            for path, leaf in leaves_in((entry.args, entry.kwargs))
            if isinstance(leaf, Ref)
            and self._tape.depends(leaf) == "parameters"
            and {"sum"} == self._known(leaf) & {"sum", "mean", "same"}
        ]
        if sums and self._may(entry, *sums):
            self._mend(entry, *sums)


def leaves_of_part(leaves: Sequence[Tensor], first: int, end: int, lap: int | None) -> list[Tensor]:
    """The tensors of a part of a batch: some rows, or some tokens and so many behind them."""
    if lap is None:
        return [leaf[first:end] if leaf.dim() else leaf for leaf in leaves]
    return slice_tokens(list(leaves), first, end + lap)


def text_of(entry: TapeEntry) -> str:
    """A call and its place, for people."""
    return f"{entry.name if entry.block is None else f'layer {entry.block}'} at {entry.line}"


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
        return refs_of(self.origin)

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
    """Results with the tensors that plain numbers among them were read from, by what both runs read."""
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
    """A batch's result from those of its parts, which have these shares of the rows.

    Raises:
        ValueError: If it was the same for all parts when the batch was looked at, and is not now.
    """
    first = values[0]
    if way == LIST:
        return type(first)([item for value in values for item in value])
    if way.startswith("rows"):
        return joined(values, way)
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
