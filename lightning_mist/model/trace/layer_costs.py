"""What the parts of a step cost, as expressions, from the ways in which it was run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import sympy
import torch

from lightning_mist.model.events import Lifetime, StepPeaks, peaks_of
from lightning_mist.model.spec import (
    BILINEAR,
    CONSTANT,
    MICROBATCH,
    SEQUENCE,
    Basis,
    CollectiveSpec,
    LayerEvents,
    LayerSpec,
    MisfitError,
    OperatorCost,
    OperatorKind,
    PartEvents,
    SelectiveSpec,
    TensorSpec,
)
from lightning_mist.model.trace.block_kinds import Example
from lightning_mist.model.trace.event_templates import layer_events, selective_events
from lightning_mist.model.trace.ledger import PhaseCount
from lightning_mist.model.trace.modes import Way, Ways, places_among
from lightning_mist.plan import LiveTensor, ModuleMap


def layer_specs(ways: Ways, examples: Sequence[Example], *, is_fake: bool) -> tuple[LayerSpec, ...]:
    """What parts of a step cost; a :class:`MisfitError` if a count is no polynomial of the sizes."""
    lines = [_peaks(ways.basis, w) for w in (ways.first, ways.later, ways.recomputed_first, ways.recomputed_later)]
    events = layer_events(ways, examples, is_fake=is_fake)
    again = selective_events(ways, examples, is_fake=is_fake)
    kept = [_peaks(ways.basis, way) for way in ways.selective or ()]
    found = []
    for example, event, pair in zip(examples, events, again, strict=True):
        part = _layer_spec(ways, lines, example, event)
        if pair is not None:
            part = replace(part, selective=_selective(ways, kept, example, pair))
        found.append(part if part.example else not_recomputed(part))
    return tuple(found)


def _selective(
    ways: Ways, lines: Sequence[StepPeaks], example: Example, events: tuple[PartEvents, PartEvents]
) -> SelectiveSpec:
    """What a part costs where layers are recomputed by operator."""
    part, basis = example.part, ways.basis
    return SelectiveSpec(
        saved_bytes=basis.expression(lines[0].saved[part]),
        forward_peak_bytes=lines[0].forward_peak(part),
        backward_peak_bytes=lines[1].backward_peak(part),
        first_backward_peak_bytes=lines[0].backward_peak(part),
        work=fit_work(basis, _repeated(ways, part), f"{example.label}'s repeated forward"),
        events=events,
    )


def _repeated(ways: Ways, part: int) -> list[PhaseCount]:
    """What a part repeats, at every size: as counted, or where it was at two of them, found among its forwards."""
    assert ways.selective is not None
    runs, forward = ways.selective[0].runs, [run.forward[part] for run in ways.first.runs]
    if len(runs) == len(forward):
        return [PhaseCount(work=run.backward[part].repeated) for run in runs]
    places = places_among(runs[0].backward[part].repeated, forward[0].work) or ()
    return [PhaseCount(work=[phase.work[place] for place in places]) for phase in forward]


def _layer_spec(ways: Ways, lines: Sequence[StepPeaks], example: Example, events: LayerEvents) -> LayerSpec:
    part, kind = example.part, example.label
    basis, runs, later = ways.basis, ways.first.runs, ways.later

    def fit(count: Callable[[PhaseCount], int], phases: Sequence[PhaseCount], what: str) -> sympy.Expr:
        return basis.fit([count(phase) for phase in phases], f"{what} of the {kind}")

    forward, backward = [run.forward[part] for run in runs], [run.backward[part] for run in runs]
    return LayerSpec(
        kind=kind,
        example=example.block,
        forward_work=fit_work(basis, forward, f"{kind}'s forward"),
        backward_work=fit_work(basis, backward, f"{kind}'s backward", later=[run.backward[part] for run in later.runs]),
        saved_bytes=basis.expression(lines[0].saved[part]),
        checkpointed_saved_bytes=basis.expression(lines[2].saved[part]),
        **peaks_of(part, *lines),
        weight_flops=fit(lambda phase: phase.weight_flops, forward, "FLOPs of weight gradients"),
        weight_bytes=fit(lambda phase: phase.weight_bytes, forward, "bytes for weight gradients"),
        forward_collectives=_collectives(basis, forward, kind),
        backward_collectives=_collectives(basis, backward, kind),
        events=events,
    )


def not_recomputed(part: LayerSpec) -> LayerSpec:
    """The head or the tail. What the head keeps may still depend on whether layers recompute."""
    found = part.selective
    if found is not None:
        found = replace(
            found,
            forward_peak_bytes=part.forward_peak_bytes,
            backward_peak_bytes=part.backward_peak_bytes,
            first_backward_peak_bytes=part.first_backward_peak_bytes,
        )
    return replace(
        part,
        selective=found,
        recompute_backward_peak_bytes=part.backward_peak_bytes,
        first_recompute_backward_peak_bytes=part.first_backward_peak_bytes,
    )


def _peaks(basis: Basis, way: Way) -> StepPeaks:

    def spans(phases: Sequence[PhaseCount]) -> list[tuple[int, int]]:
        return [(phase.start, phase.start + len(phase.timeline)) for phase in phases]

    storages = zip(way.run.storages, way.sizes, strict=True)
    lifetimes = (Lifetime(s.part, size, s.born, s.died, s.saved, s.is_gradient) for s, size in storages)
    forward, backward = spans(way.run.forward), spans(way.run.backward)
    return StepPeaks(lifetimes, forward, backward, nothing=basis.constant(0), peak=basis.peak)


def _collectives(basis: Basis, phases: Sequence[PhaseCount], kind: str) -> tuple[CollectiveSpec, ...]:
    calls = [{name: count for name, (count, _) in phase.collectives.items()} for phase in phases]
    if any(found != calls[0] for found in calls):
        raise MisfitError(f"the number of collectives of the {kind} depends on the size: {calls}")
    return tuple(
        CollectiveSpec(
            operation=name,
            calls=count,
            bytes=basis.fit([phase.collectives[name][1] for phase in phases], f"bytes of {name} of the {kind}"),
        )
        for name, count in sorted(calls[0].items())
    )


_BY_SIZE: frozenset[OperatorKind] = frozenset({"matmul", "convolution"})
"""Kinds whose speed depends on the size of each call."""

_Column = tuple[tuple[int, int], ...]  # FLOPs and bytes at every size


def fit_work(
    basis: Basis, phases: Sequence[PhaseCount], what: str, *, later: Sequence[PhaseCount] = ()
) -> tuple[OperatorCost, ...]:
    """The work of one direction of a part.

    Args:
        later: The same at some sizes, the first one first, in a step that finds gradients and adds to them: what it
            moves beyond the others depends on the parameters alone. The result is about it, if it is given.
    """
    calls = _calls(phases, what)
    after = _calls(later, what) if later else calls
    added = _added(phases[0], later[0]) if later else Counter()
    entries: list[OperatorCost] = []
    columns = _columns(phases)
    for kind in sorted({*calls, *after}):
        found = columns.get(kind, [])
        if kind in _BY_SIZE:
            if after[kind] != calls[kind] or added[kind]:
                raise MisfitError(f"adding to gradients changes the {kind} operators of the {what}")
            sizes = Counter(found)
        else:
            totals = tuple(
                (sum(column[i][0] for column in found), sum(column[i][1] for column in found) + added[kind])
                for i in range(len(phases))
            )
            sizes = Counter({totals: after[kind]})
        for column, count in sizes.items():
            if count:
                # Of a kind that is told apart by size a column is one call, of others it is all of them.
                times = count if kind in _BY_SIZE else 1
                flops = basis.fit([times * flops for flops, _ in column], f"FLOPs of the {what}")
                moved = basis.fit([times * moved for _, moved in column], f"moved bytes of the {what}")
                entries.append(OperatorCost(kind=kind, flops=flops, moved_bytes=moved, calls=count))
    return tuple(entries)


def _calls(phases: Sequence[PhaseCount], what: str) -> Counter[OperatorKind]:
    counts = [Counter(kind for kind, _, _ in phase.work) for phase in phases]
    if any(count != counts[0] for count in counts):
        numbers = sorted({sum(count.values()) for count in counts})
        raise MisfitError(f"the number of operators of the {what} depends on the size: {numbers}")
    return counts[0]


def _columns(phases: Sequence[PhaseCount]) -> dict[OperatorKind, list[_Column]]:
    """By kind, what each of its operators did at every size, matched by their order."""
    lists: list[dict[OperatorKind, list[tuple[int, int]]]] = []
    for phase in phases:
        by_kind: dict[OperatorKind, list[tuple[int, int]]] = defaultdict(list)
        for kind, flops, moved in phase.work:
            by_kind[kind].append((flops, moved))
        lists.append(by_kind)
    return {kind: list(zip(*(item[kind] for item in lists), strict=True)) for kind in lists[0]}


def _added(first: PhaseCount, later: PhaseCount) -> Counter[OperatorKind]:
    """Bytes that are moved beyond those of the first microbatch, which may also be fewer."""
    moved: Counter[OperatorKind] = Counter()
    for sign, phase in ((1, later), (-1, first)):
        for kind, _, size in phase.work:
            moved[kind] += sign * size
    return moved


Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors that enter one block."""


def _symbolic_shapes(basis: Basis, shapes: Sequence[Shapes], name: str) -> list[tuple[sympy.Expr, ...]]:
    what = f"a dimension of what enters {name}"
    tensors = zip(*shapes, strict=True)
    return [tuple(basis.fit(sizes, what) for sizes in zip(*tensor, strict=True)) for tensor in tensors]


def _guess(tensor: LiveTensor, rows: int, length: int | None, basis: Basis) -> tuple[sympy.Expr, ...]:
    """Dimensions of a tensor that no block takes as an argument: the batch's own, and those as long as the sequence."""
    shape: list[sympy.Expr] = []
    for dim, size in enumerate(tensor.shape):
        if dim == tensor.batch_dim and basis.powers != CONSTANT:
            # Rows and positions may be flattened into one dimension (routers of experts do so).
            per_row = sympy.Rational(size, rows)
            flat = basis.powers == BILINEAR and length is not None and size % (rows * length) == 0
            shape.append(per_row / length * MICROBATCH * SEQUENCE if flat else per_row * MICROBATCH)
        elif size == length and basis.powers == BILINEAR:
            shape.append(SEQUENCE)
        else:
            shape.append(sympy.Integer(size))
    return tuple(shape)


def boundary_specs(
    module_map: ModuleMap, basis: Basis, entering: Sequence[Sequence[Shapes]], length: int | None
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Specifications of every cut's live tensors, of the shapes that enter each block at every size."""
    traced_at = {MICROBATCH: module_map.batch_rows, SEQUENCE: length or 1}
    cuts = []
    for index, cut in enumerate(module_map.cuts):
        block = index + 1
        candidates = _symbolic_shapes(basis, [run[block] for run in entering], module_map.blocks[block])
        at_trace = {tuple(int(size.subs(traced_at)) for size in shape): shape for shape in reversed(candidates)}
        tensors = []
        for tensor in cut:
            shape = at_trace.get(tensor.shape) or _guess(tensor, module_map.batch_rows, length, basis)
            dtype = getattr(torch, tensor.dtype)
            tensors.append(
                TensorSpec(
                    shape=shape,
                    dtype=tensor.dtype,
                    itemsize=torch.empty(0, dtype=dtype).element_size(),
                    requires_grad=tensor.requires_grad,
                    batch_dim=tensor.batch_dim,
                )
            )
        cuts.append(tuple(tensors))
    return tuple(cuts)
