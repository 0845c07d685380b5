"""What a network costs, from its real training step and one real batch.

The step runs on fake tensors at a few sizes under a :class:`~lightning_mist.model.trace.ledger.Ledger`; every count
becomes an exact polynomial in rows and length (:mod:`~lightning_mist.model.spec.polynomial`). Blocks of one kind
run once per step, the others imitate them. Counts on fake and on real tensors are equal operator by operator, so a step
that cannot run on fakes (one that reads a value back) is counted on real tensors at small sizes instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model.cuts import compiled_text, map_module
from lightning_mist.model.device import KINDS, DeviceOperators, device_operators
from lightning_mist.model.events import timeline_of
from lightning_mist.model.fakes import describe_guesses, device_of, has_values, refusal, resize_batch, storage_of
from lightning_mist.model.spec import (
    BILINEAR,
    CONSTANT,
    QUADRATIC,
    Basis,
    LayerSpec,
    MisfitError,
    ModelSpec,
    ParameterSpec,
    Point,
    SplitSpec,
    TensorSpec,
)
from lightning_mist.model.trace.counted_step import (
    Kinds,
    StepCount,
    Subject,
    cost_keys,
    count_step,
    group,
    is_faithful,
    isolated_subject,
    trained_beside,
)
from lightning_mist.model.trace.layer_costs import Ways, boundary_specs, layer_specs, run_ways
from lightning_mist.model.trace.optimizer import describe_given
from lightning_mist.model.trace.part_hooks import RankView, present_parts
from lightning_mist.plan import Exclusion, ModuleMap, TensorSplit
from lightning_mist.plan.tensor_split import stripes_of
from lightning_mist.tensor_parallel import functions_of_wholes
from lightning_mist.tensors import batch_rows, batch_tensors, sequence_length
from lightning_mist.without_values import fake_mode

# A step to be counted, and at which sizes: rows and sequence lengths around a real batch.


Resize = Callable[[Any, int, int | None], Any]
"""``(batch, rows, length)`` to a batch of that size; the length is ``None`` where it is not to be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A user's step, and all that is needed to run it at several sizes."""

    module: nn.Module
    batch: Any
    module_map: ModuleMap
    call: Callable[[Any], Any]  # runs it on a batch
    context: Callable[[], AbstractContextManager[Any]]  # makes the context of its forward, for example autocast
    resize: Resize | None
    operators: DeviceOperators  # how the device that it will run on computes

    def subject(self, mode: FakeTensorMode | None) -> AbstractContextManager[Subject]:
        """What is run inside; slots of one parameter that different parts use get different substitutes."""
        owners = {(name, at): parts for use in self.module_map.parameters for name, at, parts in use.slots if parts}
        return isolated_subject(
            self.module,
            self.call,
            self.batch,
            blocks=self.module_map.blocks,
            mode=mode,
            owners=owners,
            context=self.context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What whole runs told of the blocks."""

    kinds: Kinds  # which of them cost the same
    kept_bytes: int  # bytes of tensors that the module keeps as plain attributes from its first step on
    timeline: list[int]  # bytes alive at every reading of a whole run at the first size
    twins: tuple[int | None, ...] = ()  # for every block ``None`` if it runs itself, else which block answers for it
    recompute_failure: str | None = None  # why they cannot be recomputed, if so
    selective_failure: str | None = None  # why not by operator, if so

    @property
    def recomputes(self) -> bool:
        """Whether blocks can be recomputed."""
        return self.recompute_failure is None


# What depends on the batch alone (masks) is computed for real, and counts are exact at any size: so sizes stay small.
_LONGEST = 512
_LONGEST_REAL = 64
_BATCH_BYTES = 1 << 24
_SCORES = 1 << 20


def _base_rows(batch: Any, rows: int, length: int) -> int:
    """The whole batch if that is cheap; else two, as operators may treat a dimension of size one as a special case."""
    size = sum(t.numel() * t.element_size() for t in batch_tensors(batch))
    return rows if rows > 1 and size <= _BATCH_BYTES and rows * length * length <= _SCORES else 2


def bases(batch: Any, *, real: bool) -> Iterator[Basis]:
    """Sets of sizes to try, the most general first; smaller ones for real numbers."""
    rows, full = batch_rows(batch), sequence_length(batch)
    if rows is None:
        yield Basis(CONSTANT, ((1, full or 1),), None)
        return
    if full is not None and full >= 4:
        longest = min(full, _LONGEST_REAL if real else _LONGEST)
        lengths = (longest, longest // 2, longest // 4)
        b = 2 if real else _base_rows(batch, rows, longest)
        points: tuple[Point, ...] = tuple((r, s) for s in lengths for r in (b, 2 * b))
        yield Basis(BILINEAR, points, (3 * b, 3 * longest // 4))
    b = 2 if real else _base_rows(batch, rows, full or 1)
    yield Basis(QUADRATIC, tuple((b * i, full or 1) for i in (1, 2, 3)), (4 * b, full or 1))
    yield Basis(CONSTANT, ((rows, full or 1),), None)


def divisible(basis: Basis, degree: int) -> Basis:
    """Sizes like others whose lengths a sequence-parallel degree divides, at least two positions for every rank."""
    # Operators treat dimensions of size one as a special case, hence two positions.
    longest = max(length for _, length in basis.sizes)
    if basis.powers != BILINEAR or longest < 6 * degree:
        raise MisfitError(f"lengths up to {longest} tell too little of costs that depend on multiples of {degree}")
    rows = sorted({rows for rows, _ in basis.points})
    least = 2 * degree
    unit = longest // (4 * least) * least
    # Without a fourth multiple the check varies the rows only.
    lengths, check = ((4 * unit, 2 * unit, unit), 3 * unit) if unit else ((3 * least, 2 * least, least), least)
    points: tuple[Point, ...] = tuple((r, s) for s in lengths for r in rows)
    return Basis(BILINEAR, points, (3 * rows[0], check))


def striped(basis: Basis, degree: int, full: int) -> Basis:
    """All of the sequence if it is short; else lengths that come apart into as many stripes as it does."""
    rows = sorted({rows for rows, _ in basis.points})
    count = stripes_of(full, degree)
    # Operators treat dimensions of size one as a special case, hence two positions.
    lengths = [each for each in range(2 * count * degree, full, count * degree) if stripes_of(each, degree) == count][
        :4
    ]
    if full <= _LONGEST or len(lengths) < 4:
        return Basis(QUADRATIC, tuple((rows[0] * i, full) for i in (1, 2, 3)), (4 * rows[0], full))
    points: tuple[Point, ...] = tuple((r, s) for s in (lengths[3], lengths[1], lengths[0]) for r in rows)
    return Basis(BILINEAR, points, (3 * rows[0], lengths[2]))


def sized(batch: Any, basis: Basis, point: Point, resize: Resize | None) -> Any:
    """The batch at one point of a basis; the batch itself where nothing can be varied."""
    if basis.powers == CONSTANT:
        return batch
    length = point[1] if basis.powers == BILINEAR else None
    return (resize or resize_batch)(batch, point[0], length)


def trace_splits(
    step: Step, counted: "_Traced", parameters: Sequence[ParameterSpec]
) -> tuple[tuple[SplitSpec, ...], tuple[Exclusion, ...]]:
    """The costs of every split of a step's module map, and which of them cannot be told and why."""
    found, excluded = [], [] if counted.is_fake or not step.module_map.splits else [_REAL]
    for split in step.module_map.splits if counted.is_fake else ():
        for sequence in (False, True) if split.sequence else (False,):
            try:
                found.append(_trace_split(step, counted, split, parameters, sequence_parallel=sequence))
            except Exception as error:
                name = f"tensor_parallel_degree {split.degree}{' with sequence parallelism' if sequence else ''}"
                reason = f"the costs of {name} cannot be traced: {type(error).__name__}: {error}"
                excluded.append(Exclusion(feature="sequence" if sequence else "tensor", reason=reason))
    return tuple(found), tuple(excluded)


def trace_contexts(
    step: Step, counted: "_Traced", parameters: Sequence[ParameterSpec]
) -> tuple[tuple[SplitSpec, ...], tuple[str, ...]]:
    """What one of the devices that share rows does, by degree; and why it is not known of others."""
    found, notes = [], []
    for split in step.module_map.contexts if counted.is_fake and counted.basis.powers == BILINEAR else ():
        try:
            found.append(_trace_split(step, counted, split, parameters, sequence_parallel=True, adds_later=True))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            notes.append(f"what a device of context_parallel_degree {split.degree} allocates is not known: {why}")
    return tuple(found), tuple(notes)


def _trace_split(
    step: Step,
    counted: "_Traced",
    split: TensorSplit,
    parameters: Sequence[ParameterSpec],
    *,
    sequence_parallel: bool,
    adds_later: bool = False,
) -> SplitSpec:
    module_map = step.module_map
    basis = counted.basis
    if adds_later:
        basis = striped(basis, split.degree, sequence_length(step.batch) or 1)
    elif sequence_parallel:
        basis = divisible(basis, split.degree)
    view, mode = RankView.of(split, sequence_parallel=sequence_parallel, adds_later=adds_later), fake_mode()
    operators = step.operators.installed(rounds=basis.powers != BILINEAR)
    with step.subject(mode) as whole, functions_of_wholes(), operators:
        parts = present_parts(step.module, whole.parameters, module_map, split, view.context, mode)
        subject = replace(whole, parameters=parts, view=view)
        ways = _run_ways(subject, basis, step, counted.blocks)
    head, *layers, tail = layer_specs(ways, counted.blocks.kinds.parts(module_map.blocks), is_fake=True)
    return SplitSpec(
        degree=split.degree,
        sequence_parallel=sequence_parallel,
        head=head,
        layers=tuple(layers),
        tail=tail,
        boundaries=_boundaries(step, counted, split.degree) if sequence_parallel else counted.boundaries,
        parameter_bytes=tuple(
            item.bytes if split.of(item.name) is None else item.bytes // split.degree for item in parameters
        ),
    )


def _boundaries(step: Step, counted: "_Traced", degree: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """The tensors that cross each cut, of those that are shared out along the sequence one rank's part."""

    def part(tensor: TensorSpec, dim: int | None) -> TensorSpec:
        if dim is None:
            return tensor
        shape = tuple(size / degree if place == dim else size for place, size in enumerate(tensor.shape))
        return replace(tensor, shape=shape)

    return tuple(
        tuple(part(tensor, live.sequence_dim) for tensor, live in zip(tensors, cut, strict=True))
        for tensors, cut in zip(counted.boundaries, step.module_map.cuts, strict=True)
    )


_REAL = Exclusion(
    feature="tensor", reason="the costs of split layers cannot be traced, because the step does not run on fake tensors"
)
"""Why tensor parallelism is ruled out for steps that are counted on real numbers."""

_UNSTACKABLE = (
    "allocations are known in sum and not one by one: layers of one kind keep tensors of others for different times"
)
"""Said where templates of layers do not add up to the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """A step that was counted over one set of sizes."""

    basis: Basis
    blocks: Blocks
    boundaries: tuple[tuple[TensorSpec, ...], ...]  # the tensors that cross each cut
    parts: tuple[LayerSpec, ...]  # head, the kinds of layers, tail
    batch_bytes: sympy.Expr
    shared: sympy.Expr
    run: StepCount  # at the first size
    is_fake: bool
    notes: tuple[str, ...]


def _find_blocks(subject: Subject, batch: Any, module_map: ModuleMap, *, last_alone: bool) -> Blocks:
    """Run a whole step, sort the blocks into kinds, and see whether imitation counts the same."""
    outside = trained_beside(module_map)
    alone = [last_alone and index == len(outside) - 1 for index in range(len(outside))]
    whole = (None,) * len(subject.blocks)

    def run(recompute: bool, gradients_exist: bool, twins: tuple[int | None, ...] = whole, **how: bool) -> StepCount:
        return count_step(subject, batch, twins=twins, recompute=recompute, gradients_exist=gradients_exist, **how)

    plain = run(False, False)
    kept = _kept_bytes(subject.module)
    if not subject.blocks:
        return Blocks(kinds=group((), ()), kept_bytes=kept, timeline=run(False, False).timeline)
    names = [type(block).__name__ for block in subject.blocks]
    for attempt in range(2):
        kinds = group(names, list(zip(cost_keys(subject.blocks, [plain]), outside, alone, strict=True)))
        twins = kinds.twins(surrounded=True)
        if _can_imitate(subject, batch, plain, kinds, twins):
            break
        if not attempt:
            # The first step of all may have filled a cache of the user's module.
            plain = run(False, False)
    else:
        twins = whole

    def failure(**how: bool) -> str | None:
        try:
            run(True, True, twins, **how)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    again, by_operator = failure(), failure(selective=True)
    return Blocks(
        kinds=kinds,
        twins=twins,
        recompute_failure=again and f"a block cannot be run a second time in backward: {again}",
        selective_failure=by_operator and f"some operators of a block cannot be run a second time: {by_operator}",
        kept_bytes=kept,
        timeline=plain.timeline,
    )


def _can_imitate(subject: Subject, batch: Any, plain: StepCount, kinds: Kinds, twins: tuple[int | None, ...]) -> bool:
    if not all(plain.describable):
        return False
    try:
        brief = count_step(subject, batch, twins=twins, recompute=False, gradients_exist=False)
    except Exception:
        # Something reads what happens inside blocks, which imitation does not reproduce. The whole run did not fail.
        return False
    return is_faithful(plain, brief, kinds)


def _kept_bytes(module: nn.Module) -> int:
    tensors = (x for item in module.modules() for x in vars(item).values() if isinstance(x, torch.Tensor))
    return sum(
        {storage_of(x): x.untyped_storage().nbytes() for x in tensors if not isinstance(x, nn.Parameter)}.values()
    )


def _fit(ways: Ways, blocks: Blocks, step: Step, *, is_fake: bool) -> _Traced:
    basis, runs = ways.basis, ways.first.runs
    parts = layer_specs(ways, blocks.kinds.parts(step.module_map.blocks), is_fake=is_fake)
    notes: tuple[str, ...] = ()
    if not _stack_up(parts, blocks, basis):
        parts = tuple(replace(part, events=None) for part in parts)
        notes = (_UNSTACKABLE,)
    entering = [run.entering for run in runs]
    return _Traced(
        basis=basis,
        blocks=blocks,
        boundaries=boundary_specs(step.module_map, basis, entering, sequence_length(step.batch)),
        parts=parts,
        batch_bytes=basis.fit(ways.batch_bytes, "batch bytes"),
        shared=basis.fit([run.shared for run in runs], "saved bytes of masks and tables"),
        run=ways.first.run,
        is_fake=is_fake,
        notes=notes,
    )


def _stack_up(parts: Sequence[LayerSpec], blocks: Blocks, basis: Basis) -> bool:
    events = [part.events.first for part in parts if part.events is not None]
    whole = (events[0], *(events[1 + kind] for kind in blocks.kinds.of), events[-1])
    return timeline_of(whole, *basis.points[0]) == blocks.timeline


def _trace(subject: Subject, step: Step) -> tuple[_Traced, list[str]]:
    """Count and fit over the most general set of sizes that the step follows; and why others failed."""
    failures: list[str] = []
    for basis in bases(step.batch, real=subject.mode is None):
        try:
            with step.operators.installed(rounds=basis.powers != BILINEAR):
                return _count(subject, step, basis), failures
        except MisfitError as error:
            failures.append(str(error))
        except Exception as error:
            if basis.powers == CONSTANT:
                raise
            failures.append(f"{type(error).__name__}: {error}")
    raise TraceError(f"the step of {step.module_map.step} has no cost expressions: {'; '.join(failures)}")


def _run_ways(subject: Subject, basis: Basis, step: Step, blocks: Blocks) -> Ways:
    return run_ways(
        subject,
        basis,
        partial(sized, step.batch, basis, resize=step.resize),
        blocks.twins,
        recomputes=blocks.recomputes,
        selective=blocks.recomputes and blocks.selective_failure is None,
    )


def _count(subject: Subject, step: Step, basis: Basis) -> _Traced:
    """Count over one set of sizes, and fit.

    The tail's part begins before the caller of the last block has let go of what that was given. Where nothing else
    keeps it, the last block is a kind of its own.
    """
    first = sized(step.batch, basis, basis.points[0], step.resize)
    for last_alone in (False, True):
        blocks = _find_blocks(subject, first, step.module_map, last_alone=last_alone)
        ways = _run_ways(subject, basis, step, blocks)
        found = _fit(ways, blocks, step, is_fake=subject.mode is not None)
        if not found.notes or blocks.kinds.of.count(blocks.kinds.of[-1]) == 1:
            break
    return found


def _traced(step: Step) -> tuple[_Traced, list[str]]:
    """Trace on fake tensors, or on real ones where the step does not run on fakes."""
    module, operators = step.module, step.operators
    failures: list[str] = []
    is_real = has_values(module)
    for mode in (fake_mode(), None):
        with step.subject(mode) as subject:
            try:
                traced, misfits = _trace(subject, step)
            except TraceError:
                raise
            except Exception as error:
                if mode is None or not is_real:
                    raise TraceError(refusal(error, module, failures, is_fake=mode is not None)) from error
                failures.append(f"{refusal(error, module, (), is_fake=True)}. It was counted on real tensors instead")
                if operators.kernels:
                    failures.append(f"counted on real tensors of the CPU, which keeps other ones than {operators.name}")
                continue
        return traced, failures + misfits
    raise AssertionError("unreachable: the real run returns or raises")


def _parameters(module: nn.Module) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(name=name, numel=p.numel(), bytes=p.numel() * p.element_size(), trainable=p.requires_grad)
        for name, p in module.named_parameters()
    )


def _exclusions(module_map: ModuleMap, traced: _Traced, failures: list[str]) -> ModuleMap:
    """Costs that are known at one size only rule out other sizes; blocks that do not run twice, recomputation."""
    found = []
    if traced.basis.powers == CONSTANT and not module_map.excludes("microbatches"):
        reason = "its costs are known only for whole batches" + (f": {failures[-1]}" if failures else "")
        found.append(Exclusion(feature="microbatches", reason=reason))
    failure = traced.blocks.recompute_failure
    if failure is not None and not module_map.excludes("checkpointing"):
        found.append(Exclusion(feature="checkpointing", reason=failure))
    elif traced.blocks.selective_failure is not None:
        found.append(Exclusion(feature="selective_checkpointing", reason=traced.blocks.selective_failure))
    return replace(module_map, exclusions=(*module_map.exclusions, *found)) if found else module_map


def trace_model(
    module: nn.Module,
    batch: Any,
    *,
    call: Callable[[Any], Any] | None = None,
    module_map: ModuleMap | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    precision: str = "32-true",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    resize: Resize | None = None,
    device_kind: str | DeviceOperators | None = None,
) -> ModelSpec:
    """What a training step costs, as expressions in microbatch rows and sequence length; leaves the module as it was.

    Args:
        module: Any module with a training step, for example a ``LightningModule``.
        batch: One batch as the step gets it, on the module's device.
        call: Runs the step on a batch; ``module.training_step(batch, 0)`` by default.
        module_map: Blocks and cuts, if they are known already.
        optimizer: What will train the module: an instance, or a class for its defaults.
        context: Makes the context of the step's forward, for example autocast.
        resize: Makes batches of other sizes, where repeating rows and cutting sequences is not right.
        device_kind: Where it will train, ``"cpu"``, ``"cuda"`` or a table of operators; by default where it is.

    Raises:
        TraceError: If the step fails, returns no loss, or cannot be counted.
    """
    run = call or (lambda item: module.training_step(item, 0))  # type: ignore[operator]
    module_map = module_map or _mapped(module, batch, run, resize)
    operators = _operators(module, batch, device_kind)
    step = Step(
        module=module, batch=batch, module_map=module_map, call=run, context=context, resize=resize, operators=operators
    )
    traced, failures = _traced(step)
    optimizer_spec, notes = describe_given(optimizer, _home(module, batch), operators.name)
    rows, parameters = batch_rows(batch), _parameters(module)
    splits, unknown = trace_splits(step, traced, parameters)
    contexts, without = trace_contexts(step, traced, parameters)
    return ModelSpec(
        name=type(module).__name__,
        module_map=_exclusions(replace(module_map, exclusions=(*module_map.exclusions, *unknown)), traced, failures),
        head=traced.parts[0],
        layers=tuple(traced.parts[1:-1]),
        kinds=traced.blocks.kinds.of,
        tail=traced.parts[-1],
        boundaries=traced.boundaries,
        parameters=parameters,
        buffer_bytes=traced.blocks.kept_bytes + sum(b.numel() * b.element_size() for b in module.buffers()),
        batch_bytes=traced.batch_bytes,
        batch_rows=module_map.batch_rows if rows is None else rows,
        sequence_length=sequence_length(batch) if traced.basis.powers == BILINEAR else None,
        optimizer=optimizer_spec,
        precision=precision,
        head_width=traced.run.head_width,
        compiled=compiled_text(module, module_map.blocks),
        unpriced=traced.run.narrow,
        shared_saved_bytes=traced.shared,
        splits=splits,
        contexts=contexts,
        notes=(*failures, *traced.notes, *notes, *without, *_notes(traced)),
    )


def _notes(traced: _Traced) -> Iterator[str]:
    yield from (f"{what}: profiles have no rates of that" for what in traced.run.narrow)
    if traced.run.guesses:
        yield describe_guesses(traced.run.guesses)


def _mapped(module: nn.Module, batch: Any, step: Callable[[Any], Any], resize: Resize | None) -> ModuleMap:
    rows = batch_rows(batch)
    other = None if rows is None else (resize or resize_batch)(batch, rows - 1 if rows > 1 else 2, None)
    return map_module(module, step, batch, second_batch=other)


def _operators(module: nn.Module, batch: Any, kind: str | DeviceOperators | None) -> DeviceOperators:
    """The table to trace with; one that replaces nothing where torch computes as on the device by itself."""
    home = _home(module, batch).type
    found = kind if isinstance(kind, DeviceOperators) else device_operators(kind or (home if home in KINDS else "cpu"))
    return found if home == "cpu" else replace(found, kernels=())


def _home(module: nn.Module, batch: Any) -> torch.device:
    """Where the module is; where its batch is, if it is nowhere yet."""
    return next((p.device for p in module.parameters() if not p.is_meta), device_of(batch))
