"""How the blocks of one kind can be shared out: candidates by probing, accepted if they pass the check with numbers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_mist.model.fakes import convert_plain_tensors, filled, kept_slots, put, slots_of, thin
from lightning_mist.model.split.block_calls import BlockCall, BlockCalls
from lightning_mist.model.split.factored import LARGE, MOST_BYTES, is_factored
from lightning_mist.model.split.probe import Probe, SharedLayers, probe
from lightning_mist.model.split.split_check import CPU, Outcome, arguments, prepare
from lightning_mist.plan.module_map import ModuleMap
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from lightning_mist.units import format_bytes

EXACT_ENTRIES = 2**24
"""Parts of a module of which a check holds more entries are checked in 32-bit numbers, of which a check holds twice as
many; what large matrices take as factors is little."""

_COPIES = 4  # a check holds the whole parameters and their gradients, and the parts and theirs
_SMALL = 2**20  # parameters with more entries are not copied for probing, which needs the values of norms only

Splits = tuple[ParameterSplit, ...]

NOTHING = "no two linear layers with only elementwise work or attention heads between them were found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How a kind of block is shared out over so many ranks; ``entry`` is for the position of the kind's example."""

    splits: Splits = ()  # its parameters that are shared out, by names inside the block
    entry: SequenceSplit | None = None
    leaves: tuple[tuple[int, int], ...] = ()  # results that then come in parts, as ``(leaf, dim)``
    whole_sequence: str | None = None  # why it must be entered with whole sequences, if so
    notes: tuple[str, ...] = ()  # what stays whole and why, and what is slow


class Checks:
    """Checks of one part of a module; what is large is checked over the most ranks only, for which it takes minutes.

    A split says how factors of dimensions are shared out, which does not depend on the number of ranks.
    """

    def __init__(
        self, run: Callable[[Splits, int, Any, bool], Outcome], entered: tuple[Any, Any], *, is_large: bool
    ) -> None:
        self._run, self._entered, self._is_large = run, entered, is_large
        self._known: dict[tuple[Splits, bool, bool], tuple[int, Outcome]] = {}

    def __call__(self, splits: Splits, degree: int, *, in_parts: bool, adds_later: bool = False) -> Outcome:
        """Check splits, or recall the check over a multiple of these ranks."""
        key = splits, in_parts, adds_later
        checked, outcome = self._known.get(key, (1, Outcome()))
        if self._is_large and checked > degree and checked % degree == 0:
            return outcome
        outcome = self._run(splits, degree, self._entered[in_parts], adds_later)
        if outcome.reason is None:
            self._known[key] = degree, outcome
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    label: str
    probe: Probe
    check: Checks
    free: frozenset[str]  # names of parameters that nothing but its own block uses
    entry: SequenceSplit | str  # how it would be entered in parts along the sequence, or why it cannot be
    length: int  # length of the sequence in the user's batch
    tried: int  # length in the small batch


def split_kind(module_map: ModuleMap, calls: BlockCalls, kind: int, degrees: Sequence[int]) -> dict[int, Found]:
    """How the blocks of a kind can be shared out over each number of ranks; inside of ``isolated``."""
    label = type(calls.examples[kind].block).__name__
    subject = _study(module_map, calls, kind)
    if isinstance(subject, str):
        return {degree: Found(whole_sequence=subject, notes=(f"{label} stays whole: {subject}",)) for degree in degrees}
    # Most ranks first: large blocks are then not checked again for fewer.
    found = {degree: _split(subject, degree) for degree in sorted(degrees, reverse=True)}
    return {degree: found[degree] for degree in degrees}


def rows_of_kind(module_map: ModuleMap, calls: BlockCalls, kind: int, degrees: Sequence[int]) -> dict[int, Found]:
    """Whether blocks of a kind can compute on their tokens of rows that so many ranks share; inside of ``isolated``."""
    subject = _study(module_map, calls, kind)
    if isinstance(subject, str):
        return {degree: Found(whole_sequence=subject) for degree in degrees}
    ordered = sorted(degrees, reverse=True)
    return {degree: _with_sequence(subject, Found(), degree, adds_later=True) for degree in ordered}


def held_entries(parameters: Iterable[Tensor]) -> int:
    """Of how many of these parameters' entries a check holds each: of all but those of large matrices."""
    return sum(parameter.numel() for parameter in parameters if not is_factored(parameter))


def check_type(entries: int) -> torch.dtype:
    """The floating-point type for a check of a part with so many parameters."""
    return torch.float64 if entries <= EXACT_ENTRIES else torch.float32


def too_large(entries: int, dtype: torch.dtype) -> str | None:
    """Why a part with so many entries that a check must hold cannot be checked, if so; the same on every host."""
    needed = entries * dtype.itemsize * _COPIES
    if needed <= MOST_BYTES:
        return None
    return (
        f"it could not be checked: its parameters besides matrices of more than {LARGE:,} entries take "
        f"{format_bytes(needed)} in a check, which may take {format_bytes(MOST_BYTES)}"
    )


def _study(module_map: ModuleMap, calls: BlockCalls, kind: int) -> _Subject | str:
    call = calls.examples[kind]
    entries = held_entries(call.block.parameters())
    first = check_type(entries)
    reason = too_large(entries, first)
    if reason is not None:
        return reason
    failure: Exception | None = None
    # Code that names an element type fails in another one than the user's.
    for dtype in dict.fromkeys((first, torch.float32)):
        try:
            made = _probe(call, dtype)
            trial = prepare(call, dtype)
        except Exception as error:
            failure = failure or error
            continue
        entry, length, tried = _entry(module_map, calls, kind)
        entered = None, entry if isinstance(entry, SequenceSplit) else None
        checks = Checks(trial.check, entered, is_large=entries > EXACT_ENTRIES)
        return _Subject(
            label=type(call.block).__name__,
            probe=made,
            check=checks,
            free=_free(module_map, calls, kind),
            entry=entry,
            length=length,
            tried=tried,
        )
    return f"it cannot be run by itself on the CPU: {type(failure).__name__}: {failure}"


def _probe(call: BlockCall, dtype: torch.dtype) -> Probe:
    generator = torch.Generator().manual_seed(0)
    with kept_slots(call.block):
        held: dict[str, Tensor] = {}
        for name, (parameter, slots) in slots_of(call.block).items():
            if parameter.numel() > _SMALL and parameter.is_floating_point():
                held[name] = thin(parameter, dtype, generator)
            else:
                held[name] = filled(parameter, dtype, generator)
            if held[name].is_floating_point():
                held[name].requires_grad_()
            put(slots, held[name])
        convert_plain_tensors(call.block, dtype, CPU)
        args, kwargs, _ = arguments(call, dtype, generator)
        hidden = None if call.hidden is None else tree_flatten((args, kwargs))[0][call.hidden]
        return probe(lambda: call.block(*args, **kwargs), held, hidden)


def _free(module_map: ModuleMap, calls: BlockCalls, kind: int) -> frozenset[str]:
    """Parameters, by names inside the block, that in every block of the kind belong to that block alone."""
    names: set[str] | None = None
    for position in calls.kinds.members(kind):
        block = module_map.blocks[position]
        own = {
            ".".join(filter(None, (owner.removeprefix(block).removeprefix("."), attribute)))
            for use in module_map.parameters
            if all(owner == block or owner.startswith(f"{block}.") for owner, _, _ in use.slots)
            for owner, attribute, _ in use.slots
        }
        names = own if names is None else names & own
    return frozenset(names or ())


def _entry(module_map: ModuleMap, calls: BlockCalls, kind: int) -> tuple[SequenceSplit | str, int, int]:
    """How a kind of block is entered in parts along the sequence, the real length and the tried one."""
    call, position = calls.examples[kind], calls.kinds.examples[kind]
    if call.hidden is None:
        return "it returns a tensor of another shape than any it takes", 0, 0
    hidden = tree_flatten((call.args, call.kwargs))[0][call.hidden]
    cuts = [module_map.cuts[p - 1] for p in calls.kinds.members(kind) if p > 0]
    alike = [
        live
        for cut in cuts
        for live in cut
        if len(live.shape) == hidden.dim() and live.shape[-1:] == tuple(hidden.shape[-1:]) and live.requires_grad
    ]
    rows = alike[0].batch_dim if alike and alike[0].batch_dim is not None else 0
    dims = [dim for dim in range(hidden.dim() - 1) if dim != rows and hidden.shape[dim] > 1]
    if not dims:
        return f"its hidden states of shape {tuple(hidden.shape)} have no dimension but rows and features", 0, 0
    length = alike[0].shape[dims[0]] if alike else hidden.shape[dims[0]]
    return SequenceSplit(position=position, leaf=call.hidden, dim=dims[0]), length, hidden.shape[dims[0]]


def _split(subject: _Subject, degree: int) -> Found:
    """The most of a kind's layers that can be shared out over ``degree`` ranks."""
    candidates = [
        layers for layers in subject.probe.layers(degree) if all(split.name in subject.free for split in layers.splits)
    ]
    notes = [f"{subject.label}: {note}" for note in subject.probe.why_whole(degree)]
    tied = [layers for layers in subject.probe.layers(degree) if layers not in candidates]
    notes += [
        f"{subject.label}: {', '.join(layers.inner)} stays whole: others use its parameters too" for layers in tied
    ]
    splits, outcome, troubles = _largest(subject, candidates, degree)
    notes += troubles
    if not splits:
        reason = NOTHING if not (candidates or notes) else "none of its layers are shared out"
        return Found(whole_sequence=reason, notes=tuple(notes or [f"{subject.label} stays whole: {NOTHING}"]))
    notes += outcome.slow(f"{subject.label} puts parts together")
    return _with_sequence(subject, Found(splits=splits, notes=tuple(notes)), degree)


def _largest(subject: _Subject, candidates: Sequence[SharedLayers], degree: int) -> tuple[Splits, Outcome, list[str]]:
    """All candidates together if they pass the check, else those that pass alone."""
    nothing: Splits = ()
    troubles: list[str] = []
    outcome = Outcome()
    chosen = list(candidates)
    while chosen:
        splits = tuple(split for layers in chosen for split in layers.splits)
        outcome = subject.check(splits, degree, in_parts=False)
        if outcome.reason is None:
            return splits, outcome, troubles
        if len(chosen) == 1 or len(chosen) < len(candidates):
            troubles.append(_differs(subject, chosen, degree, outcome))
            break
        alone = [(layers, subject.check(layers.splits, degree, in_parts=False)) for layers in chosen]
        troubles += [_differs(subject, [layers], degree, each) for layers, each in alone if each.reason is not None]
        passing = [layers for layers, each in alone if each.reason is None]
        # Each passes, together they do not: keep the largest.
        chosen = passing if len(passing) < len(chosen) else passing[:1]
    return nothing, outcome, troubles


def _differs(subject: _Subject, layers: Sequence[SharedLayers], degree: int, outcome: Outcome) -> str:
    names = ", ".join(name for each in layers for name in each.inner)
    return (
        f"{subject.label}: {names} and what feeds it stay whole: shared out over {degree} ranks it is not the same: "
        f"{outcome.reason}"
    )


def _with_sequence(subject: _Subject, found: Found, degree: int, *, adds_later: bool = False) -> Found:
    """A found split with the way to enter it in parts along the sequence, or the reason why there is none."""
    entry, outcome = subject.entry, Outcome()
    if isinstance(entry, str):
        return replace(found, whole_sequence=entry)
    if subject.length % degree:
        reason: str | None = f"the sequence has {subject.length} positions, which {degree} does not divide"
    elif subject.tried % degree:
        reason = f"it could be tried with {subject.tried} positions only, which {degree} does not divide"
    else:
        outcome = subject.check(found.splits, degree, in_parts=True, adds_later=adds_later)
        reason = outcome.reason or (None if outcome.sequence_leaves else "its results come whole")
    if reason is not None:
        return replace(found, whole_sequence=reason)
    notes = outcome.slow(f"{subject.label} puts parts of sequences together")
    return replace(found, entry=entry, leaves=outcome.sequence_leaves, notes=(*found.notes, *notes))
