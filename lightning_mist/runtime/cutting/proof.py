"""Whether, and how, the parts of a batch train as the whole does.

The step is run twice, on some rows and on fewer, and taken down as a tape. Everything else happens on the tape: padded,
masked, weighted and tied batches and other parameters are followed as wholes and as parts until every value is
explained. See :mod:`.follow`.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.attributes import replaced
from lightning_mist.runtime.checks import GradientDifferences, Steady, device_of, drops, loss_of
from lightning_mist.runtime.cutting.follow import (
    ANY,
    Findings,
    Result,
    Variant,
    best_way,
    follow,
    leaves_of_part,
    read_results,
    result_ways,
    text_of,
)
from lightning_mist.runtime.cutting.mode import SUSPICIOUS
from lightning_mist.runtime.cutting.rules import (
    ROWS,
    CutRules,
    Form,
    ResultKey,
    Site,
    Way,
    given_to,
    is_close,
    needed,
    portable_entry,
    portable_values,
    row_way,
    sizes_by_batch,
    tolerance_of,
    with_weights,
)
from lightning_mist.runtime.cutting.tape import (
    BATCH,
    Number,
    Origin,
    Read,
    Ref,
    Rows,
    Slice,
    Tape,
    TapeEntry,
    TapeRecorder,
    UncuttableError,
    Values,
    ancestors,
    draws_for_itself,
    first_slice,
    leaves_in,
    rebuilt,
    refs_of,
    run_entry,
    sources,
    takes_all,
)
from lightning_mist.runtime.process_state import get_random_state, set_random_state
from lightning_mist.tensors import batch_rows, batch_tensors, gradients_aside, sequence_length, slice_rows, slice_tokens

MOST_ROWS = 5
"""Rows of the batch that is followed: parts of two and three, or of one and four."""

_PASSES = 6

_COARSE = 2e-2
"""Largest relative difference where 16-bit numbers take part in real numbers of more bits."""

Step = Callable[[Any], tuple[Any, list[Result]]]
"""Runs the user's step on a batch: what it returned, and its results other than the loss."""


@dataclass(slots=True, kw_only=True)
class _Ran:
    """One run of the user's step."""

    tape: Tape
    loss: Ref | None
    value: Tensor
    results: list[Result]


def prove(module: nn.Module, blocks: Sequence[str], step: Step, batch: Any, lap: int | None = None) -> CutRules | str:
    """How batches like one are cut, or why they are not.

    Calls the user's step twice. What it does to the module besides gradients is the caller's to undo.

    Args:
        lap: As in :class:`CutRules`. A number asks for what is behind the last layer alone, on parts of the tokens.
    """
    device = device_of(module)
    state = get_random_state(device)
    try:
        recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase) and child.dropout]
        with (
            ExitStack() as stack,
            gradients_aside(module.parameters()),
            torch.enable_grad(),
            Steady(device, without_dropout=True) as steady,
        ):
            for child in recurrent:
                stack.enter_context(replaced(child, dropout=0.0))
            proof = _Proof(module, blocks, step, batch, lap)
            with GradientDifferences(module) as differences:
                rules = proof.rules(differences)
        return replace(rules, has_dropout=steady.is_dropping or bool(recurrent))
    except UncuttableError as error:
        return str(error)
    finally:
        set_random_state(state, device)


class _Proof:
    def __init__(self, module: nn.Module, blocks: Sequence[str], step: Step, batch: Any, lap: int | None) -> None:
        self._module, self._step, self._device, self._lap = module, step, device_of(module), lap
        self._what = "rows" if lap is None else "tokens"
        self._blocks = [module.get_submodule(name) for name in blocks]
        rows = batch_rows(batch) if lap is None else (sequence_length(batch) or 0) - lap
        if rows is None or rows < 2:
            least = f"{'first' if lap is None else 'second'} dimension of at least {2 + (lap or 0)} {self._what}"
            raise UncuttableError(f"the batch cannot be cut: its tensors do not share a {least}")
        self._rows = min(rows, MOST_ROWS) if lap is None else rows
        self._batch = slice_rows(batch, 0, self._rows) if lap is None else batch
        self._state = get_random_state(self._device)
        self._is_coarse = False

    def rules(self, differences: GradientDifferences) -> CutRules:
        """The rules; raises if there are none."""
        whole = self._run(self._batch, self._rows, differences)
        _refuse_reads(whole.tape)
        if whole.tape.stray is not None:
            line = whole.tape.stray
            raise UncuttableError(f"a value made inside a layer is used outside, and is no result of it, at {line}")
        few = self._rows // 2
        part = slice_rows(self._batch, 0, few) if self._lap is None else slice_tokens(self._batch, 0, few + self._lap)
        fewer = self._run(part, few)
        reads = _explain_numbers(whole.tape, fewer.tape)
        whole.results = read_results(whole.results, fewer.results, reads)
        _refuse_unused_reads(whole)
        if whole.loss is None:
            raise UncuttableError("the loss is not made by functions of torch that can be followed")
        tape, leaves = whole.tape, batch_tensors(self._batch)
        self._is_coarse = any(entry.autocast[0] for entry in tape.entries)
        results = [result.origin for result in whole.results if result.origin is not None]
        wanted = [whole.loss, *(ref for result in whole.results for ref in result.refs)]
        refuse_draws(tape, wanted)
        self._compare(whole, leaves, self._rows, whole.value, differences)
        self._compare(whole, leaves_of_part(leaves, 0, few, self._lap), few, fewer.value, None)
        found = Findings()
        self._follow_all(tape, leaves, list(dict.fromkeys([whole.loss, *results])), whole.loss, found)
        found.spoil_unclear(tape, wanted)
        if whole.loss in found.spoilt:
            raise UncuttableError(f"the loss depends on {self._what} together: {found.spoilt[whole.loss]}")
        ways = result_ways(whole.results, fewer.results, found, (self._rows, few))
        if isinstance(ways, str):
            raise UncuttableError(ways)
        ways["loss",] = frozenset(found.ways.get(whole.loss, set()) & {"mean", "sum", "same"})
        of_whole, of_part = self._compare_gradients(tape, leaves, whole.loss, found, best_way(ways["loss",]))
        sizes_by_batch(tape, of_whole, of_part, len(leaves))
        made = _rules(self._module, whole, fewer.tape, found, ways, len(leaves))
        if self._lap is not None and made.whole_tail:
            raise UncuttableError(made.whole_tail)
        return replace(made, is_of_one=batch_rows(self._batch) == 1)

    def _run(self, batch: Any, rows: int, differences: GradientDifferences | None = None) -> _Ran:
        recorder = TapeRecorder(self._module, self._blocks, batch, rows, self._device)
        recorder.tape.lap = self._lap
        set_random_state(self._state, self._device)
        outside = _outside()
        with recorder.running():
            output, results = self._step(batch)
        if outside != _outside():
            raise UncuttableError("the step draws random numbers from Python or numpy, which parts would draw anew")
        loss = loss_of(output)
        if differences is not None:
            with _refusing("the step has no gradients for fewer tokens") if self._lap is not None else nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
            differences.turn()
        return _Ran(
            tape=recorder.tape,
            loss=recorder.ref_of(loss),
            value=loss.detach(),
            results=[result.located(recorder.ref_of) for result in results],
        )

    # Following ---------------------------------------------------------------------------------------------------

    def _compare(
        self, ran: _Ran, leaves: Sequence[Tensor], rows: int, value: Tensor, differences: GradientDifferences | None
    ) -> None:
        """See whether the tape gives what the step gave."""
        assert ran.loss is not None
        set_random_state(self._state, self._device)
        values = Values([leaf.clone() for leaf in leaves], rows)
        what = f"what the step computes does not run on fewer {self._what}"
        with _refusing(what), torch.set_grad_enabled(differences is not None):
            for entry in ancestors(ran.tape, [ran.loss]):
                run_entry(entry, values, self._device)
            found = values[ran.loss]
            if differences is not None:
                found.backward()  # type: ignore[no-untyped-call]
        limit = self._limit(value)
        if not is_close(found.detach(), value, limit):
            raise UncuttableError(
                f"what the step computes goes by more than its batch's tensors: followed for {rows} rows, its loss is "
                f"{found.item():.6g} in place of {value.item():.6g}"
            )
        if differences is not None:
            _refuse_other_gradients(differences, limit, "the step's gradients are not those of what it computes")
            differences.clear()

    def _limit(self, value: Tensor) -> float:
        return _COARSE if self._is_coarse else tolerance_of(value.dtype)

    def _variants(self, tape: Tape, leaves: Sequence[Tensor]) -> list[tuple[Variant, bool]]:
        """What is followed, and whether with other parameters."""
        rows = self._rows
        small, half = (1, rows - 1), (rows // 2, rows - rows // 2)
        make = Perturber(tape, leaves)
        labels = make.labels

        return [
            (Variant(name=ANY, leaves=leaves, rows=small, labels=labels), False),  # first: it tells most ways apart
            (Variant(name="the batch", leaves=leaves, rows=half), False),
            (Variant(name="padded", leaves=make.padded(), rows=small, labels=labels), False),
            (Variant(name="shuffled", leaves=make.shuffled(), rows=half, labels=labels), True),
            (Variant(name="tied", leaves=make.tied(), rows=small), True),
        ]

    def _follow_all(
        self, tape: Tape, leaves: Sequence[Tensor], wanted: Sequence[Ref | Origin], loss: Ref, found: Findings
    ) -> None:
        variants = self._variants(tape, leaves)
        failed: set[str] = set()
        for _ in range(_PASSES):
            before = found.text
            found.begin()
            for variant, has_other in variants:
                if variant.name in failed or loss in found.spoilt:
                    continue
                set_random_state(self._state, self._device)
                try:
                    with torch.no_grad(), other_parameters(self._module) if has_other else nullcontext():
                        follow(tape, wanted, found, variant, _COARSE if self._is_coarse else None)
                except (torch.OutOfMemoryError, MemoryError):
                    raise
                except Exception as error:  # a batch that the step does not take
                    if variant.name == "the batch":
                        raise UncuttableError(
                            f"what the step computes does not run on parts: {_short(error)}"
                        ) from error
                    failed.add(variant.name)
                    before = ""
            if found.text == before:
                return
        raise UncuttableError("what the parts of a batch must compute differently does not settle")

    def _compare_gradients(
        self, tape: Tape, leaves: Sequence[Tensor], loss: Ref, found: Findings, way: str | None
    ) -> list[Values]:
        """Compare gradients of wholes and parts, as they are and padded; tensors of the batch and of its first part."""
        seen: list[Values] = []
        for variant, _ in self._variants(tape, leaves)[1:3]:
            set_random_state(self._state, self._device)
            try:
                whole, parts = follow(tape, [loss], found, variant, _COARSE if self._is_coarse else None)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception:  # such a batch was not followed either
                if variant.name == "the batch":
                    raise
                continue
            seen = seen or [whole, parts[0]]
            if not torch.isfinite(whole[loss]).all():
                continue
            with GradientDifferences(self._module) as differences:
                shared = self._lap is not None  # parts hang on the layers of the whole
                whole[loss].backward(retain_graph=shared)  # type: ignore[no-untyped-call]
                differences.turn()
                for part, rows in zip(parts, variant.rows, strict=True):
                    share = 1.0 if way == "sum" else rows / self._rows
                    (part[loss] * share).backward(retain_graph=shared)  # type: ignore[no-untyped-call]
                _refuse_other_gradients(
                    differences, self._limit(whole[loss]),
                    f"the gradients of a batch's parts do not add up to those of the batch ({variant.name})",
                )  # fmt: skip
        return seen


def _refuse_other_gradients(differences: GradientDifferences, limit: float, what: str) -> None:
    for name, difference, size in differences.each():
        if difference > limit * 5 * size:
            raise UncuttableError(f"{what}: that of {name} differs by {difference / max(size, 1e-30):.1e} of its size")


def _refuse_reads(tape: Tape) -> None:
    """Refuse decisions by values that depend on parameters: parts would decide for themselves."""
    for entry in tape.entries:
        if entry.name != "__bool__" or entry.depends != "parameters" or entry.block is not None:
            continue
        refs = [leaf for _, leaf in leaves_in(entry.args) if isinstance(leaf, Ref)]
        made = {earlier.name for earlier in ancestors(tape, refs) if earlier.block is None}
        if not made & {"isnan", "isinf", "isfinite"}:
            raise UncuttableError(f"the step decides by a value that depends on parameters, at {entry.line}")


def _refuse_unused_reads(ran: _Ran) -> None:
    """Refuse numbers that a step takes of values, and neither computes with nor gives: parts would take their own."""
    numbers = [leaf.origin for entry in ran.tape.entries for _, leaf in leaves_in((entry.args, entry.kwargs))
               if isinstance(leaf, Number)]  # fmt: skip
    used = {ref for origin in numbers for ref in refs_of(origin)}
    used |= {ref for result in ran.results for ref in result.refs}
    for entry in ran.tape.entries:
        if not entry.is_read or entry.name == "__bool__" or entry.depends != "parameters" or entry.block is not None:
            continue
        if not used & {leaf for _, leaf in leaves_in(entry.args) if isinstance(leaf, Ref)}:
            raise UncuttableError(f"the step takes numbers for something beside its results, at {entry.line}")


def _explain_numbers(tape: Tape, fewer: Tape) -> dict[tuple[Any, Any], Ref]:
    """See which plain numbers go with the rows or with values that were read; tensors by pairs of such values."""
    reads: dict[tuple[Any, Any], Ref] = {}
    if [entry.name for entry in tape.entries] != [entry.name for entry in fewer.entries]:
        return reads  # a decision by the batch's values: what comes of it is compared
    for entry, other in zip(tape.entries, fewer.entries, strict=True):
        if entry.is_read and isinstance(entry.args[0], Ref) and type(entry.read) in (int, float):
            reads[entry.read, other.read] = entry.args[0]
        values = dict(leaves_in((other.args, other.kwargs)))
        changes = {}
        for path, leaf in leaves_in((entry.args, entry.kwargs)):
            twin = values.get(path)
            if type(leaf) not in (int, float) or type(twin) is not type(leaf) or leaf == twin:
                continue
            assert isinstance(leaf, (int, float))
            assert isinstance(twin, (int, float))
            if (leaf, twin) in reads:
                changes[path] = Number(Read("item", reads[leaf, twin]))
            elif tape.lap is None and leaf * fewer.rows == twin * tape.rows and leaf % tape.rows == 0:
                changes[path] = Number(Rows(int(leaf) // tape.rows))
        if changes:
            entry.args, entry.kwargs = rebuilt((entry.args, entry.kwargs), changes.get)
    return reads


def _outside() -> tuple[Any, ...]:
    """The states of random generators outside of torch."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[1].tobytes(), *state[2:])


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Inside, whatever a call says of a batch that it was not taken down for is a refusal."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise UncuttableError(f"{what}: {_short(error)}") from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _forms(tape: Tape, found: Findings, wanted: Sequence[Ref]) -> tuple[dict[Any, tuple[Form, ...]], dict[Ref, Way]]:
    """What calls make of values that are put together from rows, and these values; blocks' own are not seen later."""
    values: dict[Ref, Way] = {}
    forms: dict[Any, tuple[Form, ...]] = {}
    for entry in ancestors(tape, wanted):
        if entry.block is not None:
            continue
        given = given_to(entry.args, entry.kwargs, lambda leaf: values.get(leaf) if isinstance(leaf, Ref) else None)
        for ref in entry.refs if entry.depends == "parameters" else ():
            if (way := best_way(found.ways.get(ref, set()))) in ("mean", "sum", "max", "min"):
                values[ref] = way
        form = given, tuple(values.get(ref) for ref in entry.refs)
        if given or any(form[1]) or entry.name in SUSPICIOUS:
            forms[entry.key] = (form,)
            if entry.index not in found.patches:
                forms[entry.key[:2]] = (*forms.get(entry.key[:2], ()), form)
    return forms, values


def _whole_tail(tape: Tape, found: Findings, wanted: Sequence[Ref]) -> str:
    """Why what runs behind the last layer has to take all rows, or tokens, at once, if so.

    What is proved of parts holds for it too if it draws nothing and takes of layers what lies there row by row: then
    these rows of what the layers gave for all are what they would have given for a part.
    """
    last, what = tape.last, "rows" if tape.lap is None else "tokens"
    for entry in (entry for entry in ancestors(tape, wanted) if entry.index > last):
        if drops(entry.name, (torch.empty(0), *entry.args[1:]), entry.kwargs):
            return f"what is behind the last layer drops something at random, at {entry.line}"
        for ref in sources(entry):
            way = row_way(found.ways.get(ref, set()))
            is_handed = BATCH < ref.entry <= last and tape.depends(ref) == "parameters"
            is_lying = way is not None and (way.endswith(" 1") if tape.lap is None else way.startswith("rows 1 1"))
            if is_handed and not is_lying:
                return f"{entry.name} at {entry.line}, behind the last layer, takes what is made of all {what} together"
    return ""


def _rules(
    module: nn.Module, ran: _Ran, fewer: Tape, found: Findings, ways: dict[ResultKey, frozenset[Way]], leaves: int
) -> CutRules:
    tape = ran.tape
    wanted = [ref for ref in (ran.loss, *(ref for result in ran.results for ref in result.refs)) if ref is not None]
    forms, values = _forms(tape, found, wanted)
    origins = {("loss",): ran.loss, **{result.key: result.origin for result in ran.results}}
    used = {entry.index for entry in ancestors(tape, wanted)}
    sites = tuple(
        Site(key=tape.entries[index].key, patches=patches, line=tape.entries[index].line)
        for index, patches in sorted(found.patches.items())
        if index in used
    )
    entries = [portable_entry(entry, module) for entry in ancestors(tape, needed(sites))]
    known = frozenset(entry.key[:2] for taken in (tape, fewer) for entry in taken.entries if entry.name in SUSPICIOUS)
    slices = [first_slice(entry.args[1]) for entry in tape.entries if entry.name == "__getitem__"]
    by_number = [ends for ends in slices if ends and any(isinstance(end, Number) for end in ends)]
    fixed = [ends for ends in slices if ends and all(end is None or type(end) is int for end in ends)]
    fewer_rows = [ends for ends in fixed if not takes_all(ends, tape.rows)]
    return CutRules(
        whole_tail=_whole_tail(tape, found, wanted),
        lap=tape.lap,
        slices=(*dict.fromkeys(fewer_rows), *([ROWS] if by_number else ())),
        sites=tuple(with_weights(site, lambda weight: portable_values(weight, module)) for site in sites),
        slice=Slice(entries, tape.device) if needed(sites) else None,
        seen=ways,
        results={key: best_way(known) or "mean" for key, known in ways.items()},
        leaves=leaves,
        known=known,
        forms=forms,
        traced={key: values[origin] for key, origin in origins.items() if isinstance(origin, Ref) and origin in values},
    )


# Other batches than the one that was looked at: padded, masked, weighted, with ties, and other parameters.


_LOOKUPS = frozenset(
    (
        *("embedding", "gather", "index_select", "take", "take_along_dim", "scatter", "scatter_", "scatter_add"),
        *("scatter_add_", "one_hot", "index_add", "index_add_", "bincount", "index_copy", "__getitem__", "__setitem__"),
        *("cross_entropy", "nll_loss", "ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "embedding_bag"),
    )
)
_COMPARISONS = {"ne": 0, "eq": 0, "__ne__": 0, "__eq__": 0, "ge": -1, "gt": 0, "lt": 0, "le": 1}
"""Comparisons with a number, and what to add to the number to get a value that does not count."""

_MOST_BYTES = 2 << 30
"""Parameters of more bytes are not perturbed: a second copy of them may not fit."""


class Perturber:
    """Makes other batches of the form of one."""

    def __init__(self, tape: Tape, leaves: Sequence[Tensor]) -> None:
        self._leaves = list(leaves)
        self._generator = torch.Generator().manual_seed(17)
        self._absent = [self._absent_values(tape, index) for index in range(len(leaves))]
        self._is_lookup = [_looks_up(tape, index) for index in range(len(leaves))]

    def _absent_values(self, tape: Tape, index: int) -> list[int]:
        """The values of a leaf that its step treats as nothing: it compares with them."""
        found = []
        for entry in tape.entries:
            if entry.name not in _COMPARISONS or entry.depends != "data":
                continue
            numbers = [leaf for _, leaf in leaves_in(entry.args) if type(leaf) in (int, float)]
            refs = [leaf for _, leaf in leaves_in(entry.args) if isinstance(leaf, Ref)]
            if len(numbers) == 1 and len(refs) == 1 and _comes_from(tape, refs[0], index):
                found.append(int(numbers[0]) + _COMPARISONS[entry.name])
        return found

    def padded(self) -> list[Tensor]:
        """Rows that end early, one of which has nothing to count, and other weights."""
        return [self._padded(index, leaf) for index, leaf in enumerate(self._leaves)]

    def shuffled(self) -> list[Tensor]:
        """Rows in another order, with other entries and padding."""
        order = torch.randperm(len(self._leaves[0]) if self._leaves[0].dim() else 1, generator=self._generator)
        made = []
        for index, leaf in enumerate(self._leaves):
            mixed = self._varied(index, leaf[order.to(leaf.device)]) if leaf.dim() else leaf
            made.append(self._scaled(mixed) if leaf.dtype.is_floating_point and leaf.dim() else mixed)
            can_be_absent = any(self._is_allowed(index, value) for value in self._absent[index])
            if not _is_mask(leaf) and can_be_absent and index % 2:
                made[-1] = self._padded(index, made[-1])
        return made

    def tied(self) -> list[Tensor]:
        """All rows equal to the first."""
        return [leaf[:1].expand_as(leaf).clone() if leaf.dim() else leaf for leaf in self._leaves]

    def _varied(self, index: int, leaf: Tensor) -> Tensor:
        """Whole numbers that are no positions, other ones where all are alike: of those nothing would be seen."""
        is_alike = not leaf.dtype.is_floating_point and leaf.numel() and bool((leaf == leaf.flatten()[0]).all())
        if not is_alike or self._is_lookup[index]:
            return leaf
        change = torch.rand(leaf.shape, generator=self._generator).to(leaf.device) < 0.5
        first = int(leaf.flatten()[0])
        return torch.where(change, torch.full_like(leaf, first - 1 if first > 0 else first + 1), leaf)

    def _is_allowed(self, index: int, value: int) -> bool:
        # An index out of bounds ends the process on a GPU.
        leaf = self._leaves[index]
        return not self._is_lookup[index] or (value >= 0 and leaf.numel() > 0 and value <= int(leaf.max()))

    def _padded(self, index: int, leaf: Tensor) -> Tensor:
        if not leaf.dim() or not leaf.numel():
            return leaf
        keeps_first = True
        if _is_mask(leaf):
            absent = 0
        elif leaf.dtype.is_floating_point:
            return self._scaled(leaf)
        else:
            values = [value for value in self._absent[index] if self._is_allowed(index, value)]
            if not values:
                return leaf
            absent, keeps_first = values[0], False
        keep = self._ends(leaf, keeps_first=keeps_first)
        return leaf.masked_fill(~keep.to(leaf.device), absent)

    def _ends(self, leaf: Tensor, *, keeps_first: bool) -> Tensor:
        """Which entries of every row count: as many as come first in it."""
        if leaf.dim() == 1:
            keep = torch.rand(leaf.shape, generator=self._generator) > 0.5
            keep[-1] = True
            return keep
        length = leaf.shape[-1]
        count = torch.randint(1 if keeps_first else 0, length + 1, leaf.shape[:-1], generator=self._generator)
        if not keeps_first:
            count[0] = 0
        count[-1] = max(1, length // 2)
        return torch.arange(length) < count.unsqueeze(-1)

    def _scaled(self, leaf: Tensor) -> Tensor:
        factor = (torch.rand(leaf.shape, generator=self._generator) * 0.8 + 0.2).to(leaf.device, leaf.dtype)
        return leaf * factor if leaf.any() else factor  # what is zero in this batch may not be in the next

    def labels(self, target: Tensor, ignored: int) -> Tensor:
        """Labels some of which are ignored, among them all of the first rows."""
        drop = torch.rand(target.shape, generator=self._generator) < 0.4
        drop[: max(1, len(target) // 4)] = True
        counting = (target != ignored).flatten().nonzero()
        drop.view(-1)[int(counting[-1]) if len(counting) else -1] = False
        return target.masked_fill(drop.to(target.device), ignored)


def _is_mask(leaf: Tensor) -> bool:
    if leaf.dtype == torch.bool:
        return True
    return leaf.dim() > 1 and bool(((leaf == 0) | (leaf == 1)).all()) and bool((leaf == 1).any())


def _comes_from(tape: Tape, ref: Ref, index: int) -> bool:
    used = (leaf for entry in ancestors(tape, [ref]) for _, leaf in leaves_in((entry.args, entry.kwargs)))
    return any(isinstance(leaf, Ref) and leaf == Ref(BATCH, index) for leaf in (ref, *used))


def _looks_up(tape: Tape, index: int) -> bool:
    """Whether values of a leaf are positions in something."""
    holding = {Ref(BATCH, index)} if _is_position(tape, Ref(BATCH, index)) else set()
    for entry in tape.entries:
        used = {leaf for _, leaf in leaves_in((entry.args, entry.kwargs)) if isinstance(leaf, Ref)}
        if not used & holding:
            continue
        if entry.block is not None or entry.name in _LOOKUPS:
            return True
        holding.update(ref for ref in entry.refs if entry.depends == "data" and _is_position(tape, ref))
    return False


def _is_position(tape: Tape, ref: Ref) -> bool:
    dtype = tape.dtypes[ref]
    return not dtype.is_floating_point and dtype != torch.bool


@contextmanager
def other_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have other values, unless they are too large to be kept twice."""
    parameters = [p for p in module.parameters() if p.dtype.is_floating_point and not p.is_meta]
    if sum(p.numel() * p.element_size() for p in parameters) > _MOST_BYTES:
        yield
        return
    generator = torch.Generator().manual_seed(11)
    with ExitStack() as stack:
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            size = parameter.detach().abs().mean() if parameter.numel() else 0.0
            stack.enter_context(replaced(parameter, data=parameter.data + noise * (0.3 * size + 0.02)))
        yield


# Random numbers other than dropout: parts would draw others than the whole, unless nothing comes of them.


_DRAWS = 256
"""How often a decision by random numbers is tried: one that is taken once in twenty times is seen but in one of half a
million proofs."""


def refuse_draws(tape: Tape, wanted: Sequence[Ref]) -> None:
    """Refuse a step whose results go by random numbers other than those of dropout.

    Layers that are dropped at random with a probability of zero draw numbers too, by which nothing is decided.
    """
    if not any(entry.is_random for entry in tape.entries):
        return
    for entry in tape.entries:
        if entry.is_random and (entry.block is not None or draws_for_itself(entry.kwargs)):
            raise _refused(entry)
    for entry in ancestors(tape, wanted):
        if entry.is_random:
            raise _refused(entry)
    for entry in tape.entries:
        refs = [leaf for _, leaf in leaves_in((entry.args, entry.kwargs)) if isinstance(leaf, Ref)]
        if entry.is_read and any(earlier.is_random for earlier in ancestors(tape, refs)):
            _try_decision(tape, entry, refs)


def _try_decision(tape: Tape, read: TapeEntry, refs: Sequence[Ref]) -> None:
    earlier = ancestors(tape, refs)
    drawn = next(entry for entry in earlier if entry.is_random)
    goes_by_more = any(entry.depends != "nothing" for entry in earlier) or any(ref.entry == BATCH for ref in refs)
    if read.name != "__bool__" or goes_by_more:
        raise _refused(drawn)
    with torch.no_grad():
        for _ in range(_DRAWS):
            values = Values((), tape.rows)
            for entry in earlier:
                run_entry(entry, values, tape.device)
            if read.function(values[refs[0]]) != read.read:
                raise _refused(drawn)


def _refused(entry: TapeEntry) -> UncuttableError:
    return UncuttableError(
        f"the step draws random numbers other than dropout ({text_of(entry)}): parts of a batch would draw others than "
        "the whole"
    )
