"""How rows can be shared out over context-parallel ranks, all of which hold all parameters, proven with numbers.

Blocks compute on their rank's tokens, and only attention exchanges any. What lies before a stage's first block runs
whole on every rank, and the tail on parts as far as its functions have rules for these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import isolated
from lightning_mist.model.split.block_calls import BlockCalls, Call, call_blocks
from lightning_mist.model.split.block_splits import Found, rows_of_kind
from lightning_mist.model.split.splits import Around, look_around, sequence_dims, trouble_of
from lightning_mist.plan.module_map import ModuleMap
from lightning_mist.plan.tensor_split import MOST_STRIPES, SequenceSplit, TensorSplit


def derive_contexts(
    module: nn.Module, call: Call, batch: Any, module_map: ModuleMap, degrees: Sequence[int]
) -> ModuleMap:
    """Find out over how many ranks rows can be shared out, and prove it with numbers.

    As :func:`~lightning_mist.model.split.splits.derive_splits` it leaves nothing behind in the module, whose parameters
    may be without values.

    Returns:
        The map with one entry of ``contexts`` for every degree that works, and exclusions where none does.
    """
    wanted = sorted({degree for degree in degrees if degree > 1})
    if not wanted or module_map.excludes("context"):
        return module_map
    # What keeps a rank from running the step for others keeps it from this too.
    if reasons := [reason for reason in module_map.excludes("tensor") if reason in module_map.excludes("pipeline")]:
        return module_map.excluding("; ".join(reasons), "context")
    if trouble := trouble_of(module, module_map) or _hooked(module):
        return module_map.excluding(trouble, "context")
    with isolated(module):
        try:
            calls = call_blocks(module, call, batch, module_map.blocks, MOST_STRIPES * lcm(*wanted))
        except TraceError as error:
            return module_map.excluding(str(error), "context")
        kinds = [rows_of_kind(module_map, calls, kind, wanted) for kind in range(len(calls.examples))]
        entries = _entries(calls, kinds)
        around = look_around(module, call, calls, module_map, entries) if entries else Around()
        if module_map.leaking_blocks and entries and around.confirm is None:
            reason = f"values inside of blocks are read from outside, and the step as a whole: {around.trouble}"
            return module_map.excluding(reason, "context")
        return _every_degree(module_map, calls, kinds, entries, around)


def _hooked(module: nn.Module) -> str:
    """Why hooks keep gradients from being summands until the last backward; empty if none does."""
    for name, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            return (
                f"{name or type(each).__name__} has a backward hook: under context parallelism it would see what one "
                "rank adds to a gradient and not the gradient"
            )
    return ""


def _entries(calls: BlockCalls, kinds: Sequence[Mapping[int, Found]]) -> tuple[SequenceSplit, ...]:
    """How every block is entered on parts of its tokens; empty if some kind cannot be for any degree."""
    of_kind = [next((found.entry for found in kind.values() if found.entry is not None), None) for kind in kinds]
    found = [(position, of_kind[kind]) for position, kind in enumerate(calls.kinds.of)]
    entries = tuple(replace(entry, position=position) for position, entry in found if entry is not None)
    return entries if len(entries) == len(found) else ()


def _every_degree(
    module_map: ModuleMap,
    calls: BlockCalls,
    kinds: Sequence[Mapping[int, Found]],
    entries: tuple[SequenceSplit, ...],
    around: Around,
) -> ModuleMap:
    contexts: list[TensorSplit] = []
    refused: dict[int, str] = {}
    # Most ranks first: what is large is then not checked again for fewer.
    for degree in sorted(kinds[0], reverse=True):
        reason, notes = _judged(calls, [kind[degree] for kind in kinds], around, degree)
        if reason is None:
            contexts.insert(0, TensorSplit(degree=degree, parameters=(), sequence=entries, notes=notes))
        else:
            refused[degree] = reason
    if not contexts:
        return module_map.excluding("; ".join(dict.fromkeys(refused.values())), "context")
    dims = sequence_dims(calls, [[kind[split.degree] for kind in kinds] for split in contexts])
    cuts = tuple(
        tuple(replace(live, sequence_dim=live.sequence_dim or dims.get(live.key)) for live in cut)
        for cut in module_map.cuts
    )
    return replace(module_map, contexts=tuple(contexts), uncontexts=tuple(sorted(refused.items())), cuts=cuts)


def _judged(
    calls: BlockCalls, found: Sequence[Found], around: Around, degree: int
) -> tuple[str | None, tuple[str, ...]]:
    """Why rows cannot be shared out over so many ranks, if so, and what is slow."""
    for kind, each in enumerate(found):
        if each.entry is None:
            return f"{type(calls.examples[kind].block).__name__}: {each.whole_sequence}", ()
    if around.check is None:
        return around.trouble, ()
    notes: list[str] = []
    for check in dict.fromkeys((around.check, around.confirm)):
        outcome = check((), degree, in_parts=True, adds_later=True) if check is not None else None
        if outcome is not None and outcome.reason is not None:
            return f"the step is not the same with tokens on {degree} ranks: {outcome.reason}", ()
        notes += outcome.slow("the tail puts all tokens together") if outcome is not None else []
    return None, tuple(dict.fromkeys(notes))
