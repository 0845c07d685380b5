"""The ways to run a step, counted at several sizes, with the size of every allocation as a polynomial.

The plain way is run at every size. The others do the same work in another order or another time, so they are run at
two sizes only, and each of their allocations is found again among those of the plain way; where that fails they are
run at every size too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_mist.model.spec import Basis, Coefficients, MisfitError, Point
from lightning_mist.model.trace.counted_step import StepCount, Subject, count_step
from lightning_mist.model.trace.ledger import PhaseCount, Storage, Work
from lightning_mist.tensors import batch_tensors

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
    return Ways(
        basis=basis,
        first=first,
        later=later,
        recomputed_first=again[0],
        recomputed_later=again[1],
        selective=_unless_misfit(other) if subject.blocks and selective else None,
        batch_bytes=tuple(_bytes(batches[point]) for point in basis.sizes),
        twins=tuple(twins),
    )


def _unless_misfit(run: Callable[[bool, bool, bool], Way]) -> tuple[Way, Way] | None:
    """The ways by operator; ``None`` where what they allocate is no polynomial of the sizes."""
    with suppress(MisfitError):
        return run(True, False, True), run(True, True, True)
    return None


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
    phases = zip(*map(_phases, (first.runs[0], ends[0], first.runs[-1], ends[-1])), strict=True)
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


def _phases(run: StepCount) -> tuple[PhaseCount, ...]:
    return run.forward + run.backward


def _differ_alike(first: PhaseCount, other: PhaseCount, first_last: PhaseCount, other_last: PhaseCount) -> bool:
    """Whether another way has equally many operators at the last size, and adds as much unless it repeats a forward."""
    if other.operators != other_last.operators:
        return False
    added, added_last = other.moved_bytes - first.moved_bytes, other_last.moved_bytes - first_last.moved_bytes
    return added == added_last or other.recomputes
