"""Peaks of the parts of a step from their events, as expressions: what a count of the whole step would say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import lcm
from operator import add, sub
from typing import Any, NamedTuple

import sympy

from lightning_mist.model.spec import (
    BILINEAR,
    Allocation,
    Coefficients,
    Direction,
    LayerEvents,
    PartEvents,
    Polynomial,
    StepPoint,
    highest,
    values_at,
)


def part_peaks(head: LayerEvents, layer: LayerEvents, tail: LayerEvents) -> list[dict[str, Any]]:
    """Peaks of head, layer and tail of a network of layers of one kind, as of :func:`peaks_of`."""
    kept, kept_later, again, again_later = (
        _step_peaks([item.way(recomputed=recomputed, first=first) for item in (head, layer, layer, tail)])
        for recomputed in (False, True)
        for first in (True, False)
    )
    # Head and tail are never recomputed.
    ways = {0: (kept, kept_later), 1: (again, again_later), 3: (kept, kept_later)}
    return [peaks_of(part, kept, kept_later, *redone) for part, redone in ways.items()]


def selective_peaks(head: LayerEvents, layer: LayerEvents, tail: LayerEvents) -> dict[str, Any]:
    """Peaks of the layer of such a network, recomputed by operator as its events say, for its ``SelectiveSpec``."""
    ways = ([item.way(recomputed=True, first=first) for item in (head, layer, layer, tail)] for first in (True, False))
    again, again_later = map(_step_peaks, ways)
    return {
        "forward_peak_bytes": again.forward_peak(1),
        "backward_peak_bytes": again_later.backward_peak(1),
        "first_backward_peak_bytes": again.backward_peak(1),
    }


class Lifetime(NamedTuple):
    """An allocation of a step.

    Attributes:
        born, dies: Numbers of the first reading at which it is alive and of the first one at which it is not any more;
            ``None`` if it outlives the step.
    """

    part: int
    size: Coefficients
    born: int
    dies: int | None
    saved: bool  # whether it is alive when the step's forward has ended
    made: bool  # whether it is the gradient of a parameter that the step makes


class StepPeaks:
    """Bytes alive at every reading of a step, and the most beyond what its parts leave behind.

    Args:
        forward, backward: By part, the half-open range of its readings.

    Attributes:
        saved: By part, what its forward made and the step's forward left.
        made: By part, gradients of parameters that its backward made.
    """

    def __init__(
        self,
        lifetimes: Iterable[Lifetime],
        forward: Sequence[tuple[int, int]],
        backward: Sequence[tuple[int, int]],
        *,
        powers: tuple[tuple[int, int], ...],
        denominator: int,
    ) -> None:
        self._forward, self._backward = forward, backward
        self._peak = partial(highest, powers, denominator=denominator)
        self._nothing = nothing = (0,) * len(powers)
        self.saved, self.made = [nothing] * len(forward), [nothing] * len(forward)
        changes = [nothing] * sum(end - start for start, end in (*forward, *backward))
        for item in lifetimes:
            if item.saved:
                self.saved[item.part] = _sum(self.saved[item.part], item.size)
            if item.made:
                self.made[item.part] = _sum(self.made[item.part], item.size)
            if item.born < len(changes):
                changes[item.born] = _sum(changes[item.born], item.size)
            if item.dies is not None and item.dies < len(changes):
                changes[item.dies] = _difference(changes[item.dies], item.size)
        self._alive = list(accumulate(changes, _sum))

    def _beyond(self, base: Iterable[Coefficients], start: int, end: int) -> sympy.Expr:
        below = tuple(map(sum, zip(self._nothing, *base, strict=True)))
        return self._peak(_difference(alive, below) for alive in (self._alive[start:end] or [below]))

    def forward_peak(self, part: int) -> sympy.Expr:
        """The most in a part's forward, beyond the saved bytes of all parts before it."""
        return self._beyond(self.saved[:part], *self._forward[part])

    def backward_peak(self, part: int) -> sympy.Expr:
        """The most in a part's backward, beyond saved bytes up to its own and gradients that later parts made."""
        return self._beyond((*self.saved[: part + 1], *self.made[part + 1 :]), *self._backward[part])


def peaks_of(
    part: int, kept: StepPeaks, kept_later: StepPeaks, again: StepPeaks, again_later: StepPeaks
) -> dict[str, Any]:
    """Peaks of a part in four ways to run the step, as fields of :class:`~lightning_mist.model.spec.LayerSpec`."""
    return {
        "forward_peak_bytes": kept.forward_peak(part),
        "backward_peak_bytes": kept_later.backward_peak(part),
        "first_backward_peak_bytes": kept.backward_peak(part),
        "recompute_backward_peak_bytes": again_later.backward_peak(part),
        "first_recompute_backward_peak_bytes": again.backward_peak(part),
    }


def _step_peaks(parts: Sequence[PartEvents]) -> StepPeaks:
    clock, placed = Clock(parts), place_step(parts)
    denominator = lcm(1, *(item.allocation.size.denominator for item in placed))
    sizes = {size: _coefficients(size, denominator) for size in {item.allocation.size for item in placed}}
    end = clock.at(len(parts) - 1, "forward", parts[-1].forward_positions + 1)

    def lifetime(item: Placed) -> Lifetime:
        size, is_saved = sizes[item.allocation.size], item.born <= end < item.dies
        is_made = bool(item.allocation.parameter) and item.dies == clock.readings
        return Lifetime(item.part, size, item.born, item.dies, is_saved, is_made)

    spans = clock.spans("forward"), clock.spans("backward")
    return StepPeaks(map(lifetime, placed), *spans, powers=BILINEAR, denominator=denominator)


def _coefficients(size: Polynomial, denominator: int) -> Coefficients:
    known = dict(zip(size.powers, size.coefficients, strict=True))
    return tuple(known.get(powers, 0) * (denominator // size.denominator) for powers in BILINEAR)


def _sum(one: Coefficients, other: Coefficients) -> Coefficients:
    return tuple(map(add, one, other))


def _difference(one: Coefficients, other: Coefficients) -> Coefficients:
    return tuple(map(sub, one, other))


# Events of parts stacked into a whole step on one device: who is alive when.


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An allocation in a step."""

    allocation: Allocation
    part: int
    born: int  # number of the first reading at which it is alive, among all of the step
    dies: int  # number of the first one at which it is not any more; that of all readings if it outlives the step


class Clock:
    """Numbers the readings of a step: every part's entry and operators, from head to tail and backward again."""

    def __init__(self, parts: Sequence[PartEvents]) -> None:
        self._parts = parts
        self._starts: dict[tuple[int, Direction], int] = {}
        self.readings = 0
        order: list[tuple[int, Direction]] = [(part, "forward") for part in range(len(parts))]
        order += [(part, "backward") for part in reversed(range(len(parts)))]
        for part, direction in order:
            self._starts[part, direction] = self.readings
            self.readings += parts[part].positions(direction) + 1

    def at(self, part: int, direction: Direction, position: int) -> int:
        """The reading of a position, which may be one past the last."""
        return self._starts[part, direction] + min(position, self._parts[part].positions(direction) + 1)

    def spans(self, direction: Direction) -> list[tuple[int, int]]:
        """By part, the half-open range of its readings."""
        starts = [self._starts[part, direction] for part in range(len(self._parts))]
        return [(start, start + item.positions(direction) + 1) for start, item in zip(starts, self._parts, strict=True)]


def place_step(parts: Sequence[PartEvents]) -> tuple[Placed, ...]:
    """The allocations of a step of these parts, in the order in which they are made."""
    clock = Clock(parts)
    placed = []
    for part, events in enumerate(parts):
        for allocation in (*events.forward, *events.backward):
            born = clock.at(part, allocation.born.direction, allocation.born.position)
            dies = _death(parts, clock, part, allocation)
            placed.append(Placed(allocation=allocation, part=part, born=born, dies=dies))
    return tuple(sorted(placed, key=lambda item: item.born))


def _death(parts: Sequence[PartEvents], clock: Clock, part: int, allocation: Allocation) -> int:
    dies = allocation.dies
    if dies is None:
        return clock.readings
    target = target_part(part, dies, len(parts))
    if allocation.slot is not None:
        is_gradient = allocation.born.direction == "backward"
        releases = parts[target].arriving if is_gradient else parts[target].entering
        for release in releases:
            if release.slot == allocation.slot:
                return clock.at(target + release.dies.part, release.dies.direction, release.dies.position)
    return clock.at(target, dies.direction, dies.position)


def target_part(part: int, moment: StepPoint, num_parts: int) -> int:
    """Index of the part that a moment is in."""
    start = {"own": part, "head": 0, "tail": num_parts - 1}[moment.anchor]
    return min(max(start + moment.part, 0), num_parts - 1)


def timeline_of(parts: Sequence[PartEvents], rows: int, length: int = 1) -> list[int]:
    """Bytes alive on entry of every part and after every operator of one step of these parts on one device."""
    changes = [0] * (Clock(parts).readings + 1)
    placed = place_step(parts)
    for item, size in zip(placed, values_at([p.allocation.size for p in placed], rows, length), strict=True):
        changes[item.born] += size
        changes[item.dies] -= size
    return list(accumulate(changes))[:-1]
