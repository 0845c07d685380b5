"""Where an unmodified module can be cut, found by running its step twice on fake tensors.

The second run sees another batch (a part of the first, if one is given): what differs between the runs depends on the
data, on random numbers or on earlier runs, and what a stage would have to remember from the trace must not. Sizes that
differ as the numbers of rows do tell batch dimensions.
"""

import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.attributes import MACHINERY, is_a, of_class, package_of, stored
from lightning_mist.errors import TraceError
from lightning_mist.model.cuts.recorder import Record, Runs, Value, run_twice
from lightning_mist.model.fakes import TensorRead, parameter_slots
from lightning_mist.model.user_code import Code, names_in
from lightning_mist.plan.calls import describe_value
from lightning_mist.plan.module_map import (
    Exclusion,
    Feature,
    LiveTensor,
    ModuleMap,
    ParameterUse,
    Reasons,
    exclusions_of,
)
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.tensors import sequence_length

Slots = dict[tuple[str, str], str]


def map_module(
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Any,
    *,
    step: str = "training_step",
    second_batch: Any = None,
    blocks: str | None = None,
    kept: Callable[[], Any] = tuple,
    may_repeat: bool = False,
) -> ModuleMap:
    """Trace the user's step on fake tensors and say where the module can be cut, and what rules a cut out.

    The module and all random generators are left as they were. Logging is the caller's to silence.

    Args:
        module: The user's module. Parameters may be without storage of their own (expanded from one element).
        call: Runs the step on a batch, for example ``lambda batch: module.training_step(batch, 0)``.
        second_batch: Another batch with fewer rows, to tell batch dimensions. Without it none is known.
        kept: What is needed of the last run once it is over, besides what it returned.
        blocks: Names the repeated blocks instead of finding them; see :func:`find_blocks`.
        may_repeat: Whether a block may be called again behind the last one; the module cannot be cut then.

    Returns:
        The map. If the step cannot be traced it has no blocks, and its exclusions hold the reason.

    Raises:
        TraceError: If ``blocks`` names no modules.
    """
    candidates, names = find_blocks(module, blocks), {id(item): name for name, item in module.named_parameters()}
    slots = {
        (module_name, attribute): names[id(parameter)]
        for module_name, _, attribute, parameter in parameter_slots(module)
    }
    runs = run_twice(module, call, (batch, batch if second_batch is None else second_batch), candidates, kept)
    rows = runs.rows[0] or 1
    if not runs.records:
        reason = f"the step cannot be traced: {runs.failure}"
        return _without_blocks(module, slots, step, rows, _exclude(("pipeline", "checkpointing"), reason), ())
    problems = structure_problems(runs.records, candidates, may_repeat=may_repeat)
    if not candidates or not runs.records[0].order or problems:
        exclusions = _exclude(("pipeline", "checkpointing"), *(problems or (NO_BLOCKS,)))
        exclusions += find_exclusions(module, runs, frozenset())
        return _without_blocks(module, slots, step, rows, exclusions, runs.records)
    first, second = runs.records
    (cuts, unclear), (tail, unclear_tail) = _cuts(runs), _tail(runs)
    exclusions = find_exclusions(module, runs, frozenset(first.order)) + _exclude(("pipeline",), *unclear)
    exclusions += _exclude(("tail_chunks",), *unclear_tail)
    length = sequence_length(batch) or 0
    has_tokens = all(len(live.shape) > 1 and live.shape[1] in (length, length - 1) for live in tail)
    return ModuleMap(
        step=step,
        blocks=tuple(first.order),
        cuts=cuts,
        parameters=_parameter_uses(module, slots, runs.records),
        leaking_blocks=tuple(sorted(first.leaking | second.leaking)),
        exclusions=exclusions,
        batch_rows=rows,
        indexes_by_mask=first.indexes_by_mask or second.indexes_by_mask,
        leaves_out=_leaves_out(module, slots, runs.records),
        writes="seen" if first.written_parameters or second.written_parameters else "",
        tail=tail,
        tokens=length if length and tail and has_tokens else None,
    )


def _exclude(features: tuple[Feature, ...], *reasons: str) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(feature=feature, reason=reason) for feature in features for reason in reasons)


def _without_blocks(
    module: nn.Module,
    slots: Slots,
    step: str,
    rows: int,
    exclusions: tuple[Exclusion, ...],
    records: tuple[Record, ...],
) -> ModuleMap:
    """A map of a module that is run as a whole. Without records every parameter counts as used."""
    used = Record()
    for slot in {slot for record in records for slot in record.parameter_uses} if records else slots:
        used.parameter_uses[slot].add(-1)
    return ModuleMap(
        step=step,
        blocks=(),
        cuts=(),
        parameters=_parameter_uses(module, slots, (used,)),
        exclusions=exclusions,
        batch_rows=rows,
        leaves_out=_leaves_out(module, slots, records),
        writes="seen" if any(record.written_parameters for record in records) else "" if records else "maybe",
    )


def _leaves_out(module: nn.Module, slots: Slots, records: tuple[Record, ...]) -> bool:
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return any(not trained <= {slots[slot] for slot in record.differentiated} for record in records)


def _parameter_uses(module: nn.Module, slots: Slots, records: tuple[Record, ...]) -> tuple[ParameterUse, ...]:
    held: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for slot, name in slots.items():
        regions = {region for record in records for region in record.parameter_uses.get(slot, ())}
        held.setdefault(name, []).append((*slot, tuple(sorted(regions))))
    return tuple(
        ParameterUse(
            name=name,
            slots=tuple(held[name]),
            shape=tuple(parameter.shape),
            dtype=_name_of(parameter.dtype),
            requires_grad=parameter.requires_grad,
        )
        for name, parameter in module.named_parameters()
    )


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _cuts(runs: Runs) -> tuple[tuple[tuple[LiveTensor, ...], ...], tuple[str, ...]]:
    found = [_cut(runs, f"layer {at}", partial(_alive, position=at)) for at in range(1, len(runs.records[0].order))]
    unclear = [reason for _, reasons in found for reason in reasons]
    return tuple(cut for cut, _ in found), tuple(unclear[:1])


def _cut(
    runs: Runs, where: str, alive_in: Callable[[Record], dict[Any, Value]]
) -> tuple[tuple[LiveTensor, ...], list[str]]:
    """The values that cross into some part, and why that is not clear, if so."""
    alive, other = map(alive_in, runs.records)
    cut, unclear = [], []
    if alive.keys() != other.keys():
        names = [describe_value(key) for key in alive.keys() ^ other.keys()]
        unclear.append(f"the values that cross into {where} differ from step to step: {', '.join(names)}")
    for key, value in alive.items():
        if isinstance(key, tuple) and key[0] == "unseen":
            unclear.append(f"a value of unknown origin crosses into {where} (first used at {key[3]})")
        shapes = tuple(value.tensor.shape), tuple(other.get(key, value).tensor.shape)
        batch_dim, is_clear = _batch_dim(shapes, runs.rows)
        if not is_clear:
            unclear.append(
                f"the {describe_value(key)} crosses into {where} with shapes {shapes[0]} and {shapes[1]} "
                f"for {runs.rows[0]} and {runs.rows[1]} rows: no dimension follows the rows"
            )
        cut.append(
            LiveTensor(
                key=key,
                shape=shapes[0],
                dtype=_name_of(value.tensor.dtype),
                requires_grad=value.requires_grad,
                batch_dim=batch_dim,
            )
        )
    return tuple(cut), unclear


def _alive(record: Record, position: int) -> dict[Any, Value]:
    return {key: value for key, value in record.values.items() if value.defined < position <= value.last_used}


def _tail(runs: Runs) -> tuple[tuple[LiveTensor, ...], list[str]]:
    """The values that cross into what runs behind the last block, and why it has to take all rows of them, if so."""
    last = len(runs.records[0].order) - 1

    def alive(record: Record) -> dict[Any, Value]:
        made_there = {key for key in record.values if isinstance(key, tuple) and key[:2] == ("glue", last)}
        return {k: v for k, v in record.values.items() if v.used_behind == last and k not in made_there}

    cut, unclear = _cut(runs, "what runs behind the last layer", alive)
    record = runs.records[0]
    written = {storage for storage, region in record.writes if region == last}
    shared = Counter(record.values[live.key].storage for live in cut)
    if any(count > 1 and storage in written for storage, count in shared.items()):
        unclear.append("two tensors that share memory are used behind the last layer, and one of them is written to")
    return cut, unclear[:1]


def _batch_dim(shapes: tuple[tuple[int, ...], ...], rows: tuple[int | None, ...]) -> tuple[int | None, bool]:
    """The dimension whose size follows the rows, and whether the answer is certain."""
    first, second = shapes
    differing = [dim for dim, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if not differing and len(first) == len(second):
        return None, True
    one, two = rows
    if len(first) != len(second) or len(differing) != 1 or not one or not two:
        return None, False
    (dim,) = differing
    return (dim, True) if first[dim] * two == second[dim] * one else (None, False)


# Finding the repeated blocks of any module.
#
# The outermost ``ModuleList``, ``Sequential`` or ``ModuleDict`` with at least two children of one class that is not a
# primitive layer holds blocks: all its children with parameters that are not primitive, so that models which alternate
# between two classes are covered too. Where those children differ in their parameters' shapes and hold lists of one
# class themselves (stages of different width), the inner lists hold the blocks.
#
# Whether each block is called exactly once, and in which order, is confirmed by the trace.


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_PRIMITIVE_PACKAGES = ("torch.nn.", "transformers.pytorch_utils")


def find_blocks(module: nn.Module, override: str | None = None) -> tuple[str, ...]:
    """Qualified names of the candidate repeated blocks, in the order of ``named_modules``.

    Args:
        override: Names the blocks instead: a container (its children with parameters), a pattern of qualified names
            such as ``"model.layers.*"``, or a class name. Alternatives are separated by commas.
    """
    if override is not None:
        return _named_blocks(module, override)
    seen: set[int] = set()
    names = []
    for name, block in _search(module, ""):
        if id(block) not in seen:
            seen.add(id(block))
            names.append(name)
    return tuple(names)


def container_of(name: str) -> str:
    """Name of the container of a block."""
    return name.rpartition(".")[0]


def _named_blocks(module: nn.Module, override: str) -> tuple[str, ...]:
    modules = dict(module.named_modules())
    chosen: dict[str, None] = {}
    for part in (text.strip() for text in override.split(",")):
        if isinstance(modules.get(part), _CONTAINERS):
            found = [f"{part}.{child}" for child, block in modules[part].named_children() if _has_parameters(block)]
        else:
            found = [
                name
                for name, block in modules.items()
                if name
                and (type(block).__name__ == part or (fnmatchcase(name, part) and name.count(".") == part.count(".")))
            ]
        if not found:
            raise TraceError(
                f"blocks={override!r}: {part!r} names no module. Give a container such as 'model.layers', a pattern "
                "such as 'model.layers.*', or a class name"
            )
        chosen.update(dict.fromkeys(found))
    for name in chosen:
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise TraceError(f"blocks={override!r}: {name} lies inside {outer}. A block may not contain another")
    return tuple(chosen)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_primitive(module: nn.Module) -> bool:
    package = type(module).__module__
    return next(module.children(), None) is None and package.startswith(_PRIMITIVE_PACKAGES)


def _shapes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _search(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, _CONTAINERS):
        children = [
            (f"{prefix}{name}", child)
            for name, child in module.named_children()
            if _has_parameters(child) and not _is_primitive(child)
        ]
        if max(Counter(type(child) for _, child in children).values(), default=0) >= 2:
            yield from _inner_blocks(module, children) or children
            return
    for name, child in module.named_children():
        yield from _search(child, f"{prefix}{name}.")


def _inner_blocks(container: nn.Module, children: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]] | None:
    """Blocks of one class inside children of different widths, if they hold most of the parameters."""
    if len({_shapes(child) for _, child in children}) == 1:
        return None
    inner = [found for name, child in children for found in _search(child, f"{name}.")]
    if not inner or any(type(block) is not type(inner[0][1]) for _, block in inner):
        return None
    inside = sum(parameter.numel() for _, block in inner for parameter in block.parameters())
    return inner if 2 * inside > sum(parameter.numel() for parameter in container.parameters()) else None


# What two runs of a step say against cutting the module, in words for the user.


NO_BLOCKS = (
    "no repeated blocks were found: a pipeline cuts between the children of a ModuleList, Sequential or ModuleDict of "
    "one class; name them with the argument blocks"
)

_PIPELINE: tuple[Feature, ...] = ("pipeline",)
_SHARED: tuple[Feature, ...] = ("pipeline", "tensor")
"""What lets several ranks run one rank's batch: each would do again, or on its own, what must happen once."""

_SEEN: tuple[Feature, ...] = (*_SHARED, "shards")  # what needs to know where every parameter is used

_ALL: tuple[Feature, ...] = ("pipeline", "microbatches", "checkpointing", "tensor")


def structure_problems(
    records: tuple[Record, ...], candidates: tuple[str, ...], *, may_repeat: bool = False
) -> tuple[str, ...]:
    """Why the candidates of live containers do not run one after the other, each exactly once; empty if they do.

    Args:
        may_repeat: Whether a block may run again behind them: one that is not given to a stage by itself may.
    """
    problems = []
    for record in records:
        for name, line in () if may_repeat else record.repeated.items():
            problems.append(f"block {name} is called more than once in one step (again from {line})")
        for name, outer in record.nested.items():
            problems.append(f"block {name} runs inside block {outer}: blocks must follow one another")
    ran = {name for record in records for name in record.order}
    live = {container_of(name) for name in ran}
    missing = [
        name
        for name in candidates
        if (name in ran or container_of(name) in live)
        and any(name not in record.order and name not in record.nested for record in records)
    ]
    if missing:
        problems.append(
            f"{_list(missing, 'block')} not called in every run of the step: blocks that are dropped, at random or by "
            "a condition, cannot be divided into stages"
        )
    if not problems and any(record.order != records[0].order for record in records):
        problems.append("the blocks run in another order from step to step")
    return tuple(dict.fromkeys(problems))


def _list(names: list[str], what: str) -> str:
    """``block a is``, or ``block a and 3 others are``."""
    if len(names) == 1:
        return f"{what} {names[0]} is"
    return f"{what} {names[0]} and {len(names) - 1} other{'s' if len(names) > 2 else ''} are"


def find_exclusions(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> tuple[Exclusion, ...]:
    """Everything the runs did that a cut module, a cut batch or a recomputed block would do wrongly."""
    finders = (_reads, _buffers, _attributes, _frozen_values, _randomness, _parameters, _aliases)
    return exclusions_of(reason for finder in finders for reason in finder(module, runs, blocks))


def _reads(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    last = len(runs.records[0].order) - 1
    for record in runs.records:
        for read in record.reads:
            # Where it decides about nothing but what a layer does inside, the stage that runs the layer has values.
            is_closed = read.is_inner and read.region not in record.guessing
            is_last = read.region == last and not read.is_inner
            if read.source == "parameters" and not is_last and not is_closed:
                yield (
                    f"{read.function} at {read.line} reads a value that depends on parameters {_place(read)}",
                    _PIPELINE,
                )
    first, second = (
        [r for r in record.reads if r.source != "parameters" and not r.is_inner] for record in runs.records
    )
    if [(r.line, r.value) for r in first] != [(r.line, r.value) for r in second]:
        read = next((a for a, b in zip(first, second, strict=False) if a != b), (first or second)[-1])
        yield (
            f"{read.function} at {read.line} reads a random number, by which stages would decide differently",
            _PIPELINE,
        )


def _place(read: TensorRead) -> str:
    if read.is_inner:
        return f"inside layer {read.region}"
    return "before the first layer" if read.region < 0 else f"between layers {read.region} and {read.region + 1}"


def _buffers(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    written: dict[str, str] = {}
    for record in runs.records:
        written |= record.buffers
    changed = [name for name in runs.states[1].changed_buffers(runs.states[2]) if name not in written]
    by_module: dict[str, list[str]] = {}
    for name in [*written, *changed]:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    modules = dict(module.named_modules())
    if by_module:
        owner, names = next(iter(by_module.items()))
        more = f", and buffers of {len(by_module) - 1} other modules" if len(by_module) > 1 else ""
        yield (
            f"the step changes buffer {names[0]} of a {type(modules[owner]).__name__}{more}: running statistics see "
            "whole batches once per step",
            _ALL,
        )


def _attributes(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    start, middle, end = runs.states
    changed = dict.fromkeys(middle.differs(end))
    changed |= dict.fromkeys(start.new_tensors(end, FakeTensor))
    modules = dict(module.named_modules())
    metrics = set()
    for owner, attribute in changed:
        if _is_metric(modules.get(owner)):
            metrics.add(owner)
            continue
        name = f"{owner}.{attribute}" if owner else attribute
        is_inner = any(owner == block or owner.startswith(f"{block}.") for block in blocks)
        features: tuple[Feature, ...] = _ALL if is_inner else (*_SHARED, "microbatches")
        yield f"the step changes the attribute {name} of the module, which would happen on one stage only", features
    for name, child in modules.items():
        if _is_metric(child) and any(True for _ in child.parameters()):
            # It runs beside the layers, where a stage may be left and where nothing is gathered.
            features = ("pipeline", "sharded_parameters", "offloaded_parameters")
            yield f"the metric {name} has parameters, which must be whole on every rank", features
    for name in sorted(metrics):
        yield f"the step updates the metric {name}, whose state would live on one stage only", _SHARED


def _is_metric(module: nn.Module | None) -> bool:
    return any(c.__name__ == "Metric" and c.__module__.startswith("torchmetrics") for c in type(module).__mro__)


def _frozen_values(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    first, second = runs.records
    for name, one, other in zip(first.order, first.outputs, second.outputs, strict=False):
        if one.structure != other.structure:
            yield f"block {name} returns another structure from step to step", _PIPELINE
            continue
        for a, b in zip(one.leaves, other.leaves, strict=True):
            if a[0] != b[0] or (a[0] == "value" and a != b):
                yield (
                    f"block {name} returns the Python value {a[1]!r} in one step and {b[1]!r} in another: a stage that "
                    "skips the block would not know it",
                    _PIPELINE,
                )
                return


def _randomness(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    for name in runs.outside:
        yield f"the step draws from {name}: stages would draw different numbers; draw with torch instead", _SHARED
    if runs.batch_changed:
        yield "the step writes into the tensors of its batch, which every stage would do again", ("pipeline",)


def _parameters(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    for record in runs.records:
        for name, line in record.written_parameters.items():
            # Behind a layer, or on other rows, what was written would be gone.
            yield f"the step writes into parameter {name} (at {line})", (*_SEEN, *_ALL, "sharded_parameters", "context")
        for name, line in record.stray_parameters.items():
            yield (f"the step uses parameter {name} through a reference outside its module (at {line})", _SEEN)
        if (misplaced := record.misplaced.get(len(record.order) - 1)) is not None:
            # By its name it would be taken for one that is used where it lies.
            yield misplaced, ("shards",)
        for problem in record.problems:
            yield problem, _SHARED
        for name, line in list(record.closures.items())[:1]:
            yield (
                f"block {name} reads a tensor that is not one of its arguments (at {line}), which may have changed "
                "when the block is recomputed",
                ("checkpointing",),
            )


def _aliases(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    """Tensors that share memory across a cut, one of which is written to after it."""
    record = runs.records[0]
    last_write: dict[int, int] = {}
    for storage, region in record.writes:
        last_write[storage] = max(region, last_write.get(storage, -1))
    for cut in range(1, len(record.order)):
        seen: set[int] = set()
        for value in record.values.values():
            if not value.defined < cut <= value.last_used or last_write.get(value.storage, -1) < cut:
                continue
            if value.storage in seen:
                yield (
                    f"two tensors that share memory are used before and after layer {cut} begins, and one of them is "
                    "written to after that",
                    _PIPELINE,
                )
            seen.add(value.storage)


# Which parts of a module ``torch.compile`` has compiled, in whatever way they were.


_ANYWHERE: tuple[Feature, ...] = ("pipeline", "tensor", "sequence")
_INSIDE: tuple[Feature, ...] = ("microbatches", "sharded_parameters")

_COMPILED = (
    "is compiled by torch.compile, whose code runs as a whole, on tensors as it knows them: leave torch.compile out "
    "for such plans"
)
_TORCHSCRIPT = "is TorchScript, whose code reads parameters where nobody sees it: leave torch.jit out for such plans"
_SCRIPTED: tuple[Feature, ...] = ("pipeline", "sharded_parameters", "offloaded_parameters")


def compiled_exclusions(module: nn.Module, blocks: Sequence[str] = ()) -> tuple[Exclusion, ...]:
    """What compiled code rules out: to be left in the middle, and to be given tensors without values, or in parts.

    Code around the blocks leaves them to the engine, which runs them as they are; other code runs compiled, and holds
    on to the shapes and the parameters that it has seen.
    """
    places = list(_compiled(module))
    found = [(place, _ANYWHERE) for place in places[:1]]
    around = ("the module", *(place for place in places if any(block.startswith(f"{place}.") for block in blocks)))
    found += [(place, _INSIDE) for place in [place for place in places if place not in around][:1]]
    parts = [item for item in module.named_modules() if is_a(item[1], torch.jit.ScriptModule)]
    scripted = [name for name, part in parts if any(True for _ in part.parameters())]
    reasons = [(f"{place} {_COMPILED}", features) for place, features in found]
    reasons += [(f"{name} {_TORCHSCRIPT}", _SCRIPTED) for name in scripted[:1]]
    return exclusions_of(reasons)


def is_compiled_block(block: nn.Module) -> bool:
    """Whether calling a block runs compiled code."""
    return _is_compiled(block) or stored(block, "_compiled_call_impl") is not None


def compiled_text(module: nn.Module, blocks: Sequence[str]) -> str:
    """Which blocks are compiled, such as "blocks 0-23 compiled"; empty if none is."""
    found = [number for number, name in enumerate(blocks) if is_compiled_block(module.get_submodule(name))]
    return f"block{'s' if len(found) > 1 else ''} {ranges(found)} compiled" if found else ""


def _compiled(module: nn.Module) -> Iterator[str]:
    # What Lightning keeps of ``torch.compile(module)``: its steps compiled, and this mark.
    is_whole = stored(module, "_compiler_ctx") is not None
    if is_whole:
        yield "the module"
    seen: set[type] = set()
    for name, part in module.named_modules():
        what = name.removesuffix("_orig_mod").removesuffix(".") or "the module"
        if is_compiled_block(part):
            yield what
        elif not (is_whole and part is module):
            yield from (f"{what}.{key}" for key, value in vars(part).items() if _is_compiled(value))
        for cls in type(part).__mro__:
            if cls not in seen and package_of(cls) not in MACHINERY and cls is not object:
                seen.add(cls)
                yield from _of_class(cls)


def _of_class(cls: type) -> Iterator[str]:
    """Compiled methods, and compiled functions of its file that methods call."""
    for key, value in vars(cls).items():
        if _is_compiled(value):
            yield f"{cls.__name__}.{key}"
        elif is_a(value, types.FunctionType):
            code = Code.of(value)
            for name in sorted(names_in(code.code)):
                if any(_is_compiled(item) for item in code.named([name])):
                    yield f"{name}, which {cls.__name__}.{key} calls,"


def _is_compiled(value: Any) -> bool:
    if is_a(value, nn.Module):
        return of_class(value, "_opt_mod_attributes") is not None or type(value).__name__ == "OptimizedModule"
    return callable(value) and stored(value, "_torchdynamo_orig_callable") is not None
