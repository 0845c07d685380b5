"""How a module can be shared out over tensor-parallel ranks, proven before a plan may say so.

For every kind of block: :mod:`~lightning_mist.model.split.block_splits` finds which layers can be shared out together,
:mod:`~lightning_mist.model.split.split_check` compares the block shared out in this way with the whole one. What does
not pass stays whole, and the reason is kept for the user. Context-parallel ranks, which share rows, come last.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import (
    WithoutDropout,
    convert,
    convert_batch,
    convert_plain_tensors,
    isolated,
    slots_of,
)
from lightning_mist.model.operator_costs import LinearCall, LinearMode
from lightning_mist.model.split.block_splits import (
    Found,
    held_entries,
    in_a_type,
    rows_of_kind,
    split_kind,
)
from lightning_mist.model.split.split_check import (
    CPU,
    BlockCalls,
    Call,
    Check,
    CheckedRun,
    Leaves,
    call_blocks,
    checked,
    numbers,
    valued,
    without_hooks,
)
from lightning_mist.model.trace import echo, loss_of
from lightning_mist.plan.calls import block_value, intercepted, without_caches
from lightning_mist.plan.module_map import LiveTensor, ModuleMap
from lightning_mist.plan.tensor_split import MOST_STRIPES, ParameterSplit, SequenceSplit, TensorSplit
from lightning_mist.tensor_parallel import SplitContext, enter_sequence, leaving
from lightning_mist.tensors import copy_batch

# Tables of tokens: embeddings shared out along their rows and output layers whose logits feed a cross entropy.
#
# Found by watching the step, blocks answering without running; checked by running head and tail shared out and whole.

_LOSSES = (functional.cross_entropy, functional.log_softmax, torch.log_softmax, Tensor.log_softmax)
"""What compares the entries of a row of logits with each other; has a rule for logits in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """A parameter with one row for every token."""

    name: str
    dim: int  # the dimension along which rows lie
    rows: int
    bias: str | None  # a bias of as many entries that is added to the logits, if there is one

    def splits(self) -> tuple[ParameterSplit, ...]:
        """The table, and its bias, shared out along rows."""
        factors = ((self.rows, True),)
        own = ParameterSplit(name=self.name, dim=self.dim, factors=factors)
        return (own,) if self.bias is None else (own, ParameterSplit(name=self.bias, dim=0, factors=factors))


class _Tables(LinearMode):
    """Watches which parameters are looked up in, and which products reach a cross entropy without another product."""

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        super().__init__(parameters)
        self._leaves: list[tuple[Tensor, LinearCall]] = []
        self.heads: dict[int, LinearCall] = {}
        self.lookups: dict[int, Tensor] = {}

    def answer(self, call: LinearCall, compute: Callable[[], Any]) -> Any:
        leaf = 0.1 * torch.randn(call.output_shape, dtype=call.input.dtype, device=call.input.device)
        leaf.requires_grad_()
        self._leaves.append((leaf, call))
        return leaf.clone()

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is functional.embedding and len(args) > 1 and id(args[1]) in self.parameters:
            self.lookups[id(args[1])] = args[1]
        if func in _LOSSES and isinstance(args[0] if args else None, Tensor) and args[0].requires_grad and self._leaves:
            leaves = [leaf for leaf, _ in self._leaves]
            touched = torch.autograd.grad(args[0].sum(), leaves, retain_graph=True, allow_unused=True)
            for gradient, (_, call) in zip(touched, self._leaves, strict=True):
                if gradient is not None and gradient.any():
                    self.heads[id(call.weight)] = call
        return func(*args, **kwargs)


def find_tables(
    module: nn.Module, call: Call, calls: BlockCalls, names: tuple[str, ...], *, answer: bool
) -> tuple[TokenTable, ...]:
    """The tables worth sharing out: of more rows than columns, used outside of blocks."""
    blocks = [module.get_submodule(name) for name in names]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    with isolated(module), valued(module, calls.batch) as parameters:
        shown = {id(tensors): name for name, (tensors, _) in slots_of(module).items()}
        mode = _Tables({key: tensor for key, tensor in parameters.items() if key not in inside})
        with intercepted(blocks, _handler(calls, lambda _, *given: given, answer=answer)), torch.enable_grad(), mode:
            call(copy_batch(calls.batch, with_tensors=True))
    tables: dict[str, TokenTable] = {}
    for linear in mode.heads.values():
        rows, columns = linear.weight.shape[linear.output_dim], linear.width
        if rows >= columns and linear.rows == rows:
            bias = shown.get(id(linear.bias)) if linear.bias is not None and linear.bias.shape == (rows,) else None
            name = shown[id(linear.weight)]
            tables[name] = TokenTable(name=name, dim=linear.output_dim, rows=rows, bias=bias)
    sizes = {table.rows for table in tables.values()}
    for weight in mode.lookups.values():
        name = shown[id(weight)]
        if weight.shape[0] in sizes:
            tables.setdefault(name, TokenTable(name=name, dim=0, rows=weight.shape[0], bias=None))
    tied = [tables[shown[key]] for key in mode.lookups if shown[key] in tables]
    return tuple(table for table in tables.values() if table not in tied or table.dim == 0)


def prepare_glue(
    module: nn.Module, call: Call, calls: BlockCalls, names: tuple[str, ...], dtype: torch.dtype, *, answer: bool
) -> Check:
    """Give head and tail numbers, and blocks unless answered for, and run them whole: how to check them.

    Errors of the step are raised.
    """
    blocks = tuple(module.get_submodule(name) for name in names)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    values = numbers(module, dtype, seed=3, without=inside if answer else ())
    batch = convert_batch(calls.batch, lambda tensor: convert(tensor, dtype, CPU))
    turn = threading.local()  # what the rank has that runs: ranks are threads

    def enter(position: int, args: Any, kwargs: Any) -> Any:
        return enter_sequence(args, kwargs, turn.sequence[position], turn.context) if turn.sequence else (args, kwargs)

    def run(
        tensors: Mapping[str, Tensor], context: SplitContext | None, sequence: Sequence[SequenceSplit] | None
    ) -> tuple[CheckedRun, Leaves, torch.dtype]:
        turn.context, turn.sequence = context, sequence
        torch.manual_seed(0)
        with torch.enable_grad():
            with WithoutDropout() as mode, without_hooks(context):
                output = call(copy_batch(batch, with_tensors=True))
            loss = loss_of(output if context is None else leaving(output, context))
        names = [name for name, tensor in tensors.items() if tensor.requires_grad]
        gradients = torch.autograd.grad(loss, [tensors[name] for name in names], allow_unused=True)
        result = CheckedRun(outputs=(loss.detach(),), inputs=(), parameters=dict(zip(names, gradients, strict=True)))
        return result, (), mode.coarsest

    @contextmanager
    def room() -> Iterator[None]:
        with isolated(module), valued(module, batch):
            convert_plain_tensors(module, dtype, CPU)
            with intercepted(blocks, _handler(calls, enter, answer=answer)):
                yield

    return checked(values, room, run)


def _handler(calls: BlockCalls, enter: Callable[[int, Any, Any], Any], *, answer: bool) -> Callable[..., Any]:
    """Changes the arguments of blocks, and answers for them unless they are to run."""

    def handler(position: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = enter(position, *without_caches(args, kwargs))
        if not answer:
            return forward(*args, **kwargs)
        example = calls.examples[calls.kinds.of[position]]
        if example.answer is None:
            raise TypeError(f"{type(example.block).__name__} returns what cannot be described")
        return echo(example.answer, args, kwargs, example.hidden)

    return lambda *called: partial(handler, *called)


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

    check: Check | None = None  # checks how they are shared out; None if they could not be run by themselves
    tables: tuple[TokenTable, ...] = ()
    trouble: str | None = None  # why they could not be run
    confirm: Check | None = None


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
        around = look_around(module, call, calls, module_map)
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
    for degree in kinds[0]:
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
            splits.append(confirmed)
            refusals |= {confirmed.notes[-1]: None} if made.sequence and not confirmed.sequence else {}
    if not splits:
        return _without(module_map, "; ".join(dict.fromkeys(unsplit.values())))
    result = replace(module_map, splits=tuple(splits), unsplit=tuple(unsplit.items()))
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


def _entries(calls: BlockCalls, kinds: Sequence[Mapping[int, Found]]) -> tuple[SequenceSplit, ...]:
    """How every block is entered in parts along the sequence; empty if some kind cannot be for any degree."""
    of_kind = [next((found.entry for found in kind.values() if found.entry is not None), None) for kind in kinds]
    found = [(position, of_kind[kind]) for position, kind in enumerate(calls.kinds.of)]
    entries = tuple(replace(entry, position=position) for position, entry in found if entry is not None)
    return entries if len(entries) == len(found) else ()


def look_around(module: nn.Module, call: Call, calls: BlockCalls, module_map: ModuleMap) -> Around:
    """Run head and tail by themselves; with the blocks where something inside of these is read from outside."""
    names = module_map.blocks
    inside = {id(p) for name in names for p in module.get_submodule(name).parameters()}
    whole = held_entries(module.parameters())
    outside = held_entries(parameter for parameter in module.parameters() if id(parameter) not in inside)
    is_small = sum(parameter.numel() for parameter in module.parameters()) <= _CONFIRMED_ENTRIES
    trouble: str | None = None

    def check(count: int, *, answer: bool) -> Check | None:
        nonlocal trouble
        glue = partial(prepare_glue, module, call, calls, names, answer=answer)
        made = in_a_type(count, glue, "they cannot be run by themselves")
        if isinstance(made, str):
            trouble = trouble or made
            return None
        return made

    alone = None if module_map.leaking_blocks else check(outside, answer=True)
    everything = check(whole, answer=False) if alone is None or is_small else None
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
        outcome = around.check(splits, degree)
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
    outcome = around.check(chosen, degree, entries)
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
    outcome = around.confirm(made.parameters, made.degree)
    if outcome.reason is not None:
        return f"the whole step shared out over {made.degree} ranks is not the same: {outcome.reason}"
    if not made.sequence:
        return made
    outcome = around.confirm(made.parameters, made.degree, made.sequence)
    if outcome.reason is None:
        return made
    note = f"without sequence parallelism: the whole step is not the same with it: {outcome.reason}"
    return replace(made, sequence=(), notes=(*made.notes, note))


def _cuts(
    module_map: ModuleMap, calls: BlockCalls, found: Sequence[Sequence[Found]]
) -> tuple[tuple[LiveTensor, ...], ...]:
    """The cuts with the dimension of each block's results that come in parts along the sequence for every degree."""
    dims: dict[Hashable, int] = {
        block_value(position, leaf): dim
        for position, kind in enumerate(calls.kinds.of)
        for leaf, dim in found[0][kind].leaves
        if all((leaf, dim) in of_degree[kind].leaves for of_degree in found)
    }
    return tuple(
        tuple(replace(live, sequence_dim=live.sequence_dim or dims.get(live.key)) for live in cut)
        for cut in module_map.cuts
    )


# How rows can be shared out over context-parallel ranks, all of which hold all parameters, proven with numbers.
#
# Blocks compute on their rank's tokens, and only attention exchanges any. What lies before a stage's first block runs
# whole on every rank, and the tail on parts as far as its functions have rules for these.


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
        around = look_around(module, call, calls, module_map) if entries else Around()
        if module_map.leaking_blocks and entries and around.confirm is None:
            reason = f"values inside of blocks are read from outside, and the step as a whole: {around.trouble}"
            return module_map.excluding(reason, "context")
        return _every_context_degree(module_map, calls, kinds, entries, around)


def _hooked(module: nn.Module) -> str:
    """Why hooks keep gradients from being summands until the last backward; empty if none does."""
    for name, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            return (
                f"{name or type(each).__name__} has a backward hook: under context parallelism it would see what one "
                "rank adds to a gradient and not the gradient"
            )
    return ""


def _every_context_degree(
    module_map: ModuleMap,
    calls: BlockCalls,
    kinds: Sequence[Mapping[int, Found]],
    entries: tuple[SequenceSplit, ...],
    around: Around,
) -> ModuleMap:
    contexts: list[TensorSplit] = []
    refused: dict[int, str] = {}
    for degree in kinds[0]:
        reason, notes = _judged(calls, [kind[degree] for kind in kinds], entries, around, degree)
        if reason is None:
            contexts.append(TensorSplit(degree=degree, parameters=(), sequence=entries, notes=notes))
        else:
            refused[degree] = reason
    if not contexts:
        return module_map.excluding("; ".join(dict.fromkeys(refused.values())), "context")
    cuts = _cuts(module_map, calls, [[kind[split.degree] for kind in kinds] for split in contexts])
    return replace(module_map, contexts=tuple(contexts), uncontexts=tuple(refused.items()), cuts=cuts)


def _judged(
    calls: BlockCalls, found: Sequence[Found], entries: tuple[SequenceSplit, ...], around: Around, degree: int
) -> tuple[str | None, tuple[str, ...]]:
    """Why rows cannot be shared out over so many ranks, if so, and what is slow."""
    for kind, each in enumerate(found):
        if each.entry is None:
            return f"{type(calls.examples[kind].block).__name__}: {each.whole_sequence}", ()
    if around.check is None:
        return around.trouble, ()
    notes: list[str] = []
    for check in dict.fromkeys((around.check, around.confirm)):
        outcome = check((), degree, entries, adds_later=True) if check is not None else None
        if outcome is not None and outcome.reason is not None:
            return f"the step is not the same with tokens on {degree} ranks: {outcome.reason}", ()
        notes += outcome.slow("the tail puts all tokens together") if outcome is not None else []
    return None, tuple(dict.fromkeys(notes))
