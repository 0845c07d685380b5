"""What the parts of a step cost, as expressions, from the ways in which it was run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from lightning_mist.model.events import Lifetime, StepPeaks, peaks_of
from lightning_mist.model.spec import (
    BILINEAR,
    CONSTANT,
    MICROBATCH,
    SEQUENCE,
    Allocation,
    Anchor,
    Basis,
    Coefficients,
    CollectiveSpec,
    Direction,
    LayerEvents,
    LayerSpec,
    MisfitError,
    OperatorCost,
    OperatorKind,
    PartEvents,
    Point,
    Release,
    Role,
    SelectiveSpec,
    StepPoint,
    TensorSpec,
)
from lightning_mist.model.trace.counted_step import Example, StepCount, Subject, count_step
from lightning_mist.model.trace.ledger import PhaseCount, Storage, Work
from lightning_mist.plan import LiveTensor, ModuleMap
from lightning_mist.tensors import batch_tensors

# The ways to run a step, counted at several sizes, with the size of every allocation as a polynomial.
#
# The plain way is run at every size. The others do the same work in another order or another time, so they are run at
# two sizes only, and each of their allocations is found again among those of the plain way; where that fails they are
# run at every size too.


Sized = Callable[[Point], Any]
"""Makes the batch of a size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a step, at every size or the first and last; the first run knows where allocations come from."""

    runs: tuple[StepCount, ...]
    sizes: tuple[Coefficients, ...]  # size of every allocation of a run, in their order

    @property
    def run(self) -> StepCount:
        """The run at the first size."""
        return self.runs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The ways to run a step: layers kept or recomputed, all or by operator, gradients to be made or there already."""

    basis: Basis
    first: Way
    later: Way
    recomputed_first: Way
    recomputed_later: Way
    selective: tuple[Way, Way] | None  # as the two before, by operator; None where that is not known
    batch_bytes: tuple[int, ...]  # bytes of the batch of each size
    twins: tuple[int | None, ...]  # for every block ``None`` if it ran, else the position of the block that it imitated


def run_ways(
    subject: Subject,
    basis: Basis,
    sized: Sized,
    twins: Sequence[int | None],
    *,
    recomputes: bool,
    selective: bool = False,
) -> Ways:
    """Run a step in all ways, those to recompute as those without where blocks cannot be recomputed.

    Args:
        selective: Whether also those in which blocks are recomputed by operator.
    """
    batches = {point: sized(point) for point in basis.sizes}
    ends = tuple(dict.fromkeys((basis.sizes[0], basis.sizes[-1])))

    usual: list[int] = []

    def run(point: Point, recompute: bool, gradients_exist: bool, by_operator: bool = False) -> StepCount:
        # The first run at a size may fill a cache of the user's module; all but the first step of training find it
        # there.
        for _ in range(2):
            count = count_step(
                subject,
                batches[point],
                twins=twins,
                recompute=recompute,
                gradients_exist=gradients_exist,
                selective=by_operator,
                attribute=point == ends[0],
            )
            if _operators(count) == usual:
                break
        return count

    usual = _operators(run(ends[0], False, False))
    runs = tuple(run(point, False, False) for point in basis.sizes)
    first = Way(runs=runs, sizes=_fit_sizes(basis, runs))

    def other(recompute: bool, gradients_exist: bool, by_operator: bool = False) -> Way:
        found = tuple(run(point, recompute, gradients_exist, by_operator) for point in ends)
        sizes = _found_again(basis, first, found)
        if sizes is not None and (not by_operator or _repeats_some(first, found)):
            return Way(runs=found, sizes=sizes)
        every = tuple(run(point, recompute, gradients_exist, by_operator) for point in basis.sizes)
        return Way(runs=every, sizes=_fit_sizes(basis, every))

    later = other(False, True)
    again = (other(True, False), other(True, True)) if subject.blocks and recomputes else (first, later)
    kept = None
    with suppress(MisfitError):  # where what they allocate is no polynomial of the sizes it is not known
        kept = (other(True, False, True), other(True, True, True)) if subject.blocks and selective else None
    return Ways(
        basis=basis,
        first=first,
        later=later,
        recomputed_first=again[0],
        recomputed_later=again[1],
        selective=kept,
        batch_bytes=tuple(_bytes(batches[point]) for point in basis.sizes),
        twins=tuple(twins),
    )


def _bytes(batch: Any) -> int:
    return sum(t.numel() * t.element_size() for t in batch_tensors(batch))


def _operators(count: StepCount) -> list[int]:
    return [phase.operators for phase in count.forward]


def _life(storage: Storage) -> tuple[object, ...]:
    return storage.part, storage.cause, storage.operator, storage.born, storage.died, storage.saved


def _fit_sizes(basis: Basis, runs: Sequence[StepCount]) -> tuple[Coefficients, ...]:
    """The size of every allocation, matched by their order; a :class:`MisfitError` if they do not match or fit."""
    counts = [len(run.storages) for run in runs]
    if len(set(counts)) > 1:
        raise MisfitError(
            f"the number of allocations depends on the size: {dict(zip(basis.sizes, counts, strict=True))}"
        )
    known: dict[tuple[int, ...], Coefficients] = {}
    fitted = []
    for column in zip(*(run.storages for run in runs), strict=True):
        if len({_life(storage) for storage in column}) > 1:
            raise MisfitError(
                f"an allocation by {column[0].operator} in part {column[0].part} is another one at other sizes: "
                f"{sorted({_life(storage)[2:] for storage in column}, key=str)}"
            )
        sizes = tuple(storage.bytes for storage in column)
        if sizes not in known:
            known[sizes] = basis.interpolate(sizes, f"the size of an allocation by {column[0].operator}")
        fitted.append(known[sizes])
    return tuple(fitted)


def _found_again(basis: Basis, first: Way, ends: Sequence[StepCount]) -> tuple[Coefficients, ...] | None:
    """The sizes of another way's allocations, by finding each among those of the plain one; ``None`` if one is not."""
    if any(len(run.storages) != len(ends[0].storages) for run in ends):
        return None
    runs = first.runs[0], ends[0], first.runs[-1], ends[-1]
    phases = zip(*(run.forward + run.backward for run in runs), strict=True)
    if not all(_differ_alike(*four) for four in phases):
        return None
    grouped: dict[tuple[int, str], list[tuple[Storage, Coefficients]]] = defaultdict(list)
    for storage, size in zip(first.run.storages, first.sizes, strict=True):
        grouped[storage.part, storage.cause].append((storage, size))
    sources: dict[tuple[int, str], Iterator[tuple[Storage, Coefficients]]] = {}
    found = []
    for mine, other in zip(ends[0].storages, ends[-1].storages, strict=True):
        if mine.cause == "accumulate":
            size = basis.constant(mine.bytes)  # as large as the parameter
        else:
            cause = "forward" if mine.cause == "recompute" else mine.cause
            source = sources.setdefault((mine.part, mine.cause), iter(grouped[mine.part, cause]))
            same, size = next(source, (other, ()))
            # By operator only some of a forward is repeated.
            while size and mine.cause == "recompute" and not _is_alike(same, mine):
                same, size = next(source, (other, ()))
            if not size or not _is_alike(same, mine):
                return None
            if mine.cause == "recompute":  # repeated inside backward, where callers of blocks are not seen
                mine.origin = same.origin
        if _life(mine) != _life(other) or not basis.is_at(size, basis.sizes[-1], other.bytes):
            return None
        found.append(size)
    return tuple(found)


def _is_alike(one: Storage, other: Storage) -> bool:
    return (one.operator, one.bytes) == (other.operator, other.bytes)


def _repeats_some(first: Way, ends: Sequence[StepCount]) -> bool:
    """Whether at both sizes the operators that every part repeats are the same ones of its forward."""
    for part, phase in enumerate(first.run.forward):
        places = places_among(ends[0].backward[part].repeated, phase.work)
        last = first.runs[-1].forward[part].work
        if places is None or [last[place] for place in places] != ends[-1].backward[part].repeated:
            return False
    return True


def places_among(some: Sequence[Work], work: Sequence[Work]) -> list[int] | None:
    """Where operators are found, in their order, among others; ``None`` if one is not."""
    found: list[int] = []
    for item in some:
        start = found[-1] + 1 if found else 0
        place = next((index for index in range(start, len(work)) if work[index] == item), None)
        if place is None:
            return None
        found.append(place)
    return found


def _differ_alike(first: PhaseCount, other: PhaseCount, first_last: PhaseCount, other_last: PhaseCount) -> bool:
    """Whether another way has equally many operators at the last size, and adds as much unless it repeats a forward."""
    if other.operators != other_last.operators:
        return False
    added, added_last = other.moved_bytes - first.moved_bytes, other_last.moved_bytes - first_last.moved_bytes
    return added == added_last or other.recomputes


def layer_specs(ways: Ways, examples: Sequence[Example], *, is_fake: bool) -> tuple[LayerSpec, ...]:
    """What parts of a step cost; a :class:`MisfitError` if a count is no polynomial of the sizes."""
    lines = [_peaks(ways.basis, w) for w in (ways.first, ways.later, ways.recomputed_first, ways.recomputed_later)]
    events = layer_events(ways, examples, is_fake=is_fake)
    by_operator = [(_peaks(ways.basis, way), _Steps(ways, way, is_fake)) for way in ways.selective or ()]
    found = []
    for example, event in zip(examples, events, strict=True):
        part = _layer_spec(ways, lines, example, event)
        if by_operator:
            part = replace(part, selective=_selective(ways, by_operator, example))
        found.append(part if part.example else not_recomputed(part))
    return tuple(found)


def _selective(ways: Ways, found: Sequence[tuple[StepPeaks, "_Steps"]], example: Example) -> SelectiveSpec:
    """What a part costs where layers are recomputed by operator, from a first backward and a later one."""
    part, basis = example.part, ways.basis
    (first, first_events), (later, later_events) = found
    return SelectiveSpec(
        saved_bytes=basis.expression(first.saved[part]),
        forward_peak_bytes=first.forward_peak(part),
        backward_peak_bytes=later.backward_peak(part),
        first_backward_peak_bytes=first.backward_peak(part),
        work=fit_work(basis, _repeated(ways, part), f"{example.label}'s repeated forward"),
        events=(first_events.part_events(example), later_events.part_events(example)),
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
    return StepPeaks(lifetimes, forward, backward, powers=basis.powers, denominator=basis.denominator)


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
                )
            )
        cuts.append(tuple(tensors))
    return tuple(cuts)


# Events of a part from a counted step: its allocations, with deaths told relative to it.


_Place = tuple[int, Direction, int]  # part, direction and position of a moment


def layer_events(ways: Ways, examples: Sequence[Example], *, is_fake: bool) -> tuple[LayerEvents, ...]:
    """The events of parts in the four ways to run them; fakes tell which tensors only the batch shapes."""
    steps = [
        _Steps(ways, way, is_fake) for way in (ways.first, ways.later, ways.recomputed_first, ways.recomputed_later)
    ]
    found = [[step.part_events(example) for step in steps] for example in examples]
    return tuple(
        LayerEvents(first=first, later=later, recomputed_first=again, recomputed_later=again_later)
        for first, later, again, again_later in found
    )


class _Steps:
    def __init__(self, ways: Ways, way: Way, is_fake: bool) -> None:
        self._ways, self._run, self._is_fake = ways, way.run, is_fake
        self._last = len(way.run.forward) - 1
        self._imitated = {position + 1 for position, twin in enumerate(ways.twins) if twin is not None}
        self._sizes = dict(zip(map(id, way.run.storages), way.sizes, strict=True))
        self._places = places(way.run)

    def _death(self, storage: Storage) -> _Place | None:
        """The position of what is gone at a reading is one more than that of the reading before."""
        if storage.died is None:
            return None
        part, direction, position = self._places[storage.died - 1]
        return part, direction, position + 1

    def part_events(self, example: Example) -> PartEvents:
        part = example.part
        mine = [s for s in self._run.storages if s.part == part]
        forward = [s for s in mine if s.cause == "forward"]
        backward = [s for s in mine if s.cause != "forward"]
        return PartEvents(
            forward=tuple(self._allocation(s, example, None) for s in forward),
            backward=tuple(
                self._allocation(s, example, twin)
                for s, twin in zip(backward, self._twins(backward, example.follower), strict=True)
            ),
            forward_positions=len(self._run.forward[part].timeline) - 1,
            backward_positions=len(self._run.backward[part].timeline) - 1,
            entering=self._releases(example, is_gradient=False),
            arriving=self._releases(example, is_gradient=True),
            reading=self._reading(part),
        )

    def _reading(self, part: int) -> tuple[str, ...]:
        """The parameters whose gradients are made of what the part is given."""
        given = (s for s in self._run.storages if any(g.part == part and not g.is_gradient for g in s.given))
        return tuple(sorted({name for storage in given for name in _weights(storage, part)}))

    def _twins(self, backward: Sequence[Storage], follower: int | None) -> Sequence[Storage | None]:
        """For each allocation that of the next part, which is preceded by one of its kind; ``None`` if they differ."""
        others = [s for s in self._run.storages if s.part == follower and s.cause != "forward"]
        if [s.operator for s in others] != [s.operator for s in backward]:
            return [None] * len(backward)
        return others

    def _allocation(self, storage: Storage, example: Example, twin: Storage | None) -> Allocation:
        part, direction, position = self._places[storage.born]
        dies, slot = self._dies(storage, part)
        if dies is not None and slot is None and (dies.part, dies.anchor) == (-1, "own") and twin is not None:
            dies, slot = self._dies(twin, part + 1)
        return Allocation(
            size=self._ways.basis.polynomial(self._sizes[id(storage)]),
            born=StepPoint(direction=direction, position=position),
            dies=dies,
            slot=slot,
            role=self._role(storage, part, dies, direction),
            parameter=_within(storage.parameter, example.block),
            weights=_weights(storage, part) if dies is not None and dies.direction == "backward" else (),
            module=_within(storage.origin.module, example.block),
            operator=storage.operator,
            line=storage.origin.line,
            dtype=storage.dtype,
        )

    def _dies(self, storage: Storage, part: int) -> tuple[StepPoint | None, int | None]:
        """When a storage dies, relative to the part that made it, and as which of the tensors given to another part."""
        death = self._death(storage)
        if death is None:
            return None, None
        target, direction, position = death
        is_gradient = storage.cause != "forward"
        if target == part:
            return StepPoint(direction=direction, position=position), None
        slots = {given.part: given.slot for given in reversed(storage.given) if given.is_gradient == is_gradient}
        if is_gradient and part - 1 in self._imitated and part - 1 in slots:
            target, position = part - 1, 0  # whatever the imitation did with it
        offset, anchor = self._anchored(part, target, direction)
        return StepPoint(part=offset, anchor=anchor, direction=direction, position=position), slots.get(target)

    def _anchored(self, own: int, target: int, direction: Direction) -> tuple[int, Anchor]:
        if abs(target - own) <= 1:
            return target - own, "own"
        # What all layers read dies in the last one's or the tail's forward, or in the first one's backward.
        choices: list[tuple[int, Anchor]] = [(target - self._last, "tail"), (target, "head")]
        if direction == "backward":
            choices.reverse()
        return next((choice for choice in choices if abs(choice[0]) <= 1), (target - own, "own"))

    def _role(self, storage: Storage, part: int, dies: StepPoint | None, direction: Direction) -> Role:
        if part == 0 and storage.shared and self._is_fake:
            return "shared"
        if storage.parameter or (direction == "backward" and dies is not None and dies.part != 0):
            return "gradient"
        is_own = dies is not None and (dies.part, dies.anchor) == (0, "own")
        return "temporary" if is_own and dies is not None and dies.direction == direction else "activation"

    def _releases(self, example: Example, *, is_gradient: bool) -> tuple[Release, ...]:
        """When the part, or the same kind of part behind it, lets go of what it is given."""
        found: dict[int, Release] = {}
        for part in (example.part, example.follower):
            for storage in self._run.storages if part is not None else ():
                slots = [g.slot for g in storage.given if g.part == part and g.is_gradient == is_gradient]
                death = self._death(storage) if slots else None
                if part is None or death is None or not _lets_go(storage, part, death):
                    continue
                dies = StepPoint(part=death[0] - part, direction=death[1], position=death[2])
                weights = _weights(storage, part) if death[1] == "backward" else ()
                for slot in slots:
                    found.setdefault(slot, Release(slot=slot, dies=dies, weights=weights))
        return tuple(found[slot] for slot in sorted(found))


def places(run: StepCount) -> list[_Place]:
    """Part, direction and position of every reading of a step."""
    found: dict[int, _Place] = {}
    directions: tuple[tuple[Direction, Sequence[object]], ...] = (("forward", run.forward), ("backward", run.backward))
    for direction, phases in directions:
        for part, phase in enumerate(phases):
            for position in range(len(phase.timeline)):  # type: ignore[attr-defined]
                found[phase.start + position] = part, direction, position  # type: ignore[attr-defined]
    return [found[reading] for reading in range(len(found))]


def _lets_go(storage: Storage, part: int, death: _Place) -> bool:
    """Whether it is a part that lets go of what it was given, and not whoever made it or gets it next."""
    if death[0] == part:
        return True
    # The caller's frame may hold it until the block has returned, which is when the next part has begun.
    is_given_on = any(given.part == death[0] for given in storage.given)
    return death[:2] == (part + 1, "forward") and not is_given_on


def _weights(storage: Storage, part: int) -> tuple[str, ...]:
    return tuple(name for of, name in storage.weights if of == part)


def _within(name: str, block: str) -> str:
    return "" if name == block else name.removeprefix(f"{block}.")
