"""How a module can be shared out over tensor-parallel ranks, proven before a plan may say so.

For every kind of block: :mod:`~lightning_mist.model.split.probe` finds which layers can be shared out together,
:mod:`~lightning_mist.model.split.split_check` compares the block shared out in this way with the whole one. Head and
tail: :mod:`~lightning_mist.model.split.vocabulary`. What does not pass stays whole, and the reason is kept for the
user.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import isolated
from lightning_mist.model.split.block_calls import BlockCalls, Call, call_blocks
from lightning_mist.model.split.block_splits import (
    EXACT_ENTRIES,
    Checks,
    Found,
    check_type,
    held_entries,
    split_kind,
    too_large,
)
from lightning_mist.model.split.vocabulary import Table, find_tables, prepare_glue
from lightning_mist.plan.calls import block_value
from lightning_mist.plan.module_map import LiveTensor, ModuleMap
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit, TensorSplit

_CONFIRMED_ENTRIES = 2**22
"""Modules with at most so many parameters are checked as a whole besides: it takes some tenths of a second."""

NOTHING_TO_SPLIT = "no repeated blocks were found whose layers could be shared out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Head and tail.

    Attributes:
        confirm: Checks the whole step with everything shared out; None where blocks, head and tail by themselves must
            do, because it is large.
    """

    check: Checks | None = None  # checks how they are shared out; None if they could not be run by themselves
    tables: tuple[Table, ...] = ()
    trouble: str | None = None  # why they could not be run
    confirm: Checks | None = None


def derive_splits(
    module: nn.Module, call: Call, batch: Any, module_map: ModuleMap, degrees: Sequence[int]
) -> ModuleMap:
    """Find out how a module can be shared out over tensor-parallel ranks, and prove it with numbers.

    Nothing is left behind in the module. Its parameters may be without values: blocks get random ones, one kind at a
    time. The step runs once where the module is, up to its last block; everything else is done in host memory.

    Args:
        module: The user's module with all its parameters, with values or without.
        batch: A batch; a small one is made from it where possible.

    Returns:
        The map with one entry of ``splits`` for every degree that works, and exclusions where none does.
    """
    wanted = sorted({degree for degree in degrees if degree > 1})
    if not wanted or module_map.excludes("tensor"):
        return module_map
    if trouble := trouble_of(module, module_map):
        return _without(module_map, trouble)
    with isolated(module):
        try:
            calls = call_blocks(module, call, batch, module_map.blocks, _length(wanted))
        except TraceError as error:
            return _without(module_map, str(error))
        kinds = [split_kind(module_map, calls, kind, wanted) for kind in range(len(calls.examples))]
        if not any(found.splits for kind in kinds for found in kind.values()):
            return _without(module_map, _reasons(kinds))
        around = look_around(module, call, calls, module_map, _entries(calls, kinds))
        if module_map.leaking_blocks and around.confirm is None:
            reason = f"values inside of blocks are read from outside, and the step as a whole: {around.trouble}"
            return _without(module_map, reason)
        return _every_degree(module_map, calls, kinds, around)


def trouble_of(module: nn.Module, module_map: ModuleMap) -> str:
    """Why there is no use in looking further; empty if there is."""
    if not module_map.blocks:
        return NOTHING_TO_SPLIT
    for name, parameter in module.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            # A part of one is not a tensor of the values that it stands for.
            return f"{name} is kept as {type(parameter).__name__}, whose values are made as it is used"
    return ""


def _length(degrees: Sequence[int]) -> int:
    """A length of sequences that all degrees divide, of 8 at least, so that causal masks and windows show."""
    common = lcm(*degrees)
    return common * -(-8 // common)


def _every_degree(
    module_map: ModuleMap, calls: BlockCalls, kinds: Sequence[dict[int, Found]], around: Around
) -> ModuleMap:
    splits: list[TensorSplit] = []
    unsplit: dict[int, str] = {}
    refusals: dict[str, None] = {}
    # Most ranks first: what is large is then not checked again for fewer.
    for degree in sorted(kinds[0], reverse=True):
        found = [kind[degree] for kind in kinds]
        if not any(each.splits for each in found):
            unsplit[degree] = _reasons([{degree: each} for each in found])
            continue
        chosen, notes = _split_tables(around, degree)
        sequence, refusal = _sequence(calls, found, around, chosen, _entries(calls, kinds), degree)
        if refusal is not None:
            refusals[refusal] = None
            notes += (f"without sequence parallelism: {refusal}",)
        made = _assembled(module_map, calls, found, chosen, sequence, notes, degree)
        confirmed = _confirmed(made, around)
        if isinstance(confirmed, str):
            unsplit[degree] = confirmed
        else:
            splits.insert(0, confirmed)
            refusals |= {confirmed.notes[-1]: None} if made.sequence and not confirmed.sequence else {}
    if not splits:
        return _without(module_map, "; ".join(dict.fromkeys(unsplit.values())))
    result = replace(module_map, splits=tuple(splits), unsplit=tuple(sorted(unsplit.items())))
    entered = [split.degree for split in splits if split.sequence]
    if not entered:
        return result.excluding("; ".join(refusals), "sequence")
    return replace(result, cuts=_cuts(module_map, calls, [[kind[degree] for kind in kinds] for degree in entered]))


def _reasons(kinds: Sequence[dict[int, Found]]) -> str:
    return "; ".join(dict.fromkeys(note for kind in kinds for found in kind.values() for note in found.notes))


def _without(module_map: ModuleMap, reason: str) -> ModuleMap:
    result = module_map.excluding(reason, "tensor")
    if module_map.excludes("sequence"):
        return result
    return result.excluding(f"it goes with tensor parallelism, which cannot be had: {reason}", "sequence")


def _entries(calls: BlockCalls, kinds: Sequence[dict[int, Found]]) -> tuple[SequenceSplit, ...]:
    """How each block is entered in parts along the sequence, where all can be."""
    of_kind = [next((found.entry for found in kind.values() if found.entry is not None), None) for kind in kinds]
    if any(entry is None for entry in of_kind):
        return ()
    entries = [of_kind[kind] for kind in calls.kinds.of]
    return tuple(replace(entry, position=i) for i, entry in enumerate(entries) if entry is not None)


def look_around(
    module: nn.Module, call: Call, calls: BlockCalls, module_map: ModuleMap, entries: tuple[SequenceSplit, ...]
) -> Around:
    """Run head and tail by themselves; with the blocks where something inside of these is read from outside."""
    names = module_map.blocks
    inside = {id(p) for name in names for p in module.get_submodule(name).parameters()}
    whole = held_entries(module.parameters())
    outside = held_entries(parameter for parameter in module.parameters() if id(parameter) not in inside)
    is_small = sum(parameter.numel() for parameter in module.parameters()) <= _CONFIRMED_ENTRIES
    trouble: str | None = None

    def checks(count: int, *, answer: bool) -> Checks | None:
        nonlocal trouble
        first = check_type(count)
        large = too_large(count, first)
        if large is not None:
            trouble = trouble or large
            return None
        for dtype in dict.fromkeys((first, torch.float32)):
            try:
                glue = prepare_glue(module, call, calls, names, dtype, answer=answer)
            except Exception as error:
                trouble = trouble or f"they cannot be run by themselves: {type(error).__name__}: {error}"
            else:
                return Checks(glue.check, ((), entries), is_large=count > EXACT_ENTRIES)
        return None

    alone = None if module_map.leaking_blocks else checks(outside, answer=True)
    everything = checks(whole, answer=False) if alone is None or is_small else None
    if alone is None and everything is None:
        return Around(trouble=trouble)
    try:
        tables = find_tables(module, call, calls, names, answer=alone is not None)
    except Exception as error:
        return Around(trouble=f"they cannot be watched: {type(error).__name__}: {error}", confirm=everything)
    return Around(check=alone or everything, tables=tables, confirm=everything)


def _split_tables(around: Around, degree: int) -> tuple[tuple[ParameterSplit, ...], tuple[str, ...]]:
    if around.check is None:
        return (), (f"head and tail stay whole: {around.trouble}",)
    notes = [
        f"{table.name} stays whole: it has {table.rows} rows, which {degree} does not divide"
        for table in around.tables
        if table.rows % degree
    ]
    splits = tuple(split for table in around.tables if table.rows % degree == 0 for split in table.splits())
    if splits:
        outcome = around.check(splits, degree, in_parts=False)
        if outcome.reason is not None:
            names = ", ".join(split.name for split in splits)
            notes.append(f"{names} stay whole: shared out over {degree} ranks they are not the same: {outcome.reason}")
            return (), tuple(notes)
        notes += outcome.slow("head or tail puts parts together")
    return splits, tuple(notes)


def _sequence(
    calls: BlockCalls,
    found: Sequence[Found],
    around: Around,
    chosen: tuple[ParameterSplit, ...],
    entries: tuple[SequenceSplit, ...],
    degree: int,
) -> tuple[tuple[SequenceSplit, ...], str | None]:
    for kind, each in enumerate(found):
        if each.entry is None:
            return (), f"{type(calls.examples[kind].block).__name__}: {each.whole_sequence}"
    if around.check is None:
        return (), around.trouble
    outcome = around.check(chosen, degree, in_parts=True)
    if outcome.reason is not None:
        return (), f"head and tail are not the same with sequences in parts: {outcome.reason}"
    return entries, None


def _assembled(
    module_map: ModuleMap,
    calls: BlockCalls,
    found: Sequence[Found],
    chosen: tuple[ParameterSplit, ...],
    sequence: tuple[SequenceSplit, ...],
    notes: tuple[str, ...],
    degree: int,
) -> TensorSplit:
    """All parameters' splits under their canonical names, in the module's order."""
    names = {(owner, attribute): use.name for use in module_map.parameters for owner, attribute, _ in use.slots}
    splits = {split.name: split for split in chosen}
    for block, kind in zip(module_map.blocks, calls.kinds.of, strict=True):
        for split in found[kind].splits:
            owner, _, attribute = f"{block}.{split.name}".rpartition(".")
            name = names[owner, attribute]
            splits[name] = replace(split, name=name)
    ordered = tuple(splits[use.name] for use in module_map.parameters if use.name in splits)
    told = (*(note for each in found for note in each.notes), *notes)
    return TensorSplit(degree=degree, parameters=ordered, sequence=sequence, notes=tuple(dict.fromkeys(told)))


def _confirmed(made: TensorSplit, around: Around) -> TensorSplit | str:
    """The split if the whole step computes the same with it, without parts of sequences if only these fail."""
    if around.confirm is None:
        return made
    outcome = around.confirm(made.parameters, made.degree, in_parts=False)
    if outcome.reason is not None:
        return f"the whole step shared out over {made.degree} ranks is not the same: {outcome.reason}"
    if not made.sequence:
        return made
    outcome = around.confirm(made.parameters, made.degree, in_parts=True)
    if outcome.reason is None:
        return made
    note = f"without sequence parallelism: the whole step is not the same with it: {outcome.reason}"
    return replace(made, sequence=(), notes=(*made.notes, note))


def _cuts(
    module_map: ModuleMap, calls: BlockCalls, found: Sequence[Sequence[Found]]
) -> tuple[tuple[LiveTensor, ...], ...]:
    """The cuts with the dimension of each block's results that come in parts along the sequence for every degree."""
    dims = sequence_dims(calls, found)
    return tuple(tuple(replace(live, sequence_dim=dims.get(live.key)) for live in cut) for cut in module_map.cuts)


def sequence_dims(calls: BlockCalls, found: Sequence[Sequence[Found]]) -> dict[Hashable, int]:
    """The dimension of each block's results, by their key, that comes in parts for every degree."""
    return {
        block_value(position, leaf): dim
        for position, kind in enumerate(calls.kinds.of)
        for leaf, dim in found[0][kind].leaves
        if all((leaf, dim) in of_degree[kind].leaves for of_degree in found)
    }
