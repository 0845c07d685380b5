"""Peaks of the parts of a step from their events, as expressions: what a count of the whole step would say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

import sympy

from lightning_mist.model.events.event_stacking import Clock, Placed, place_step
from lightning_mist.model.spec import BILINEAR, Coefficients, LayerEvents, PartEvents, Polynomial, undominated


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPeaks:
    """Peaks of one part, named and counted as in :class:`~lightning_mist.model.spec.model_spec.LayerSpec`."""

    forward: sympy.Expr
    backward: sympy.Expr
    first_backward: sympy.Expr
    recompute_backward: sympy.Expr
    first_recompute_backward: sympy.Expr


def part_peaks(head: LayerEvents, layer: LayerEvents, tail: LayerEvents) -> tuple[PartPeaks, PartPeaks, PartPeaks]:
    """Peaks of head, layer and tail of a network of layers of one kind."""
    steps = {}
    for recomputed in (False, True):
        for first in (False, True):
            ways = [item.way(recomputed=recomputed, first=first) for item in (head, layer, layer, tail)]
            steps[recomputed, first] = _Step(ways)
    parts = []
    for part in (0, 1, 3):
        # Head and tail are never recomputed.
        again = part == 1
        parts.append(
            PartPeaks(
                forward=steps[False, True].forward_peak(part),
                backward=steps[False, False].backward_peak(part),
                first_backward=steps[False, True].backward_peak(part),
                recompute_backward=steps[again, False].backward_peak(part),
                first_recompute_backward=steps[again, True].backward_peak(part),
            )
        )
    return parts[0], parts[1], parts[2]


class _Step:
    """Bytes alive at every reading of a step, as coefficients over one denominator."""

    def __init__(self, parts: Sequence[PartEvents]) -> None:
        self._clock, placed = Clock(parts), place_step(parts)
        self._parts = parts
        self._denominator = lcm(1, *(item.allocation.size.denominator for item in placed))
        sizes = {}
        for item in placed:
            key = item.allocation.size
            if key not in sizes:
                sizes[key] = self._coefficients(key)
        changes = [[0] * len(BILINEAR) for _ in range(self._clock.readings + 1)]
        for item in placed:
            for place, value in enumerate(sizes[item.allocation.size]):
                changes[item.born][place] += value
                changes[item.dies][place] -= value
        self._alive = list(accumulate(map(tuple, changes), _add))
        end = self._clock.at(len(parts) - 1, "forward", parts[-1].forward_positions + 1)
        self._saved = self._sums(placed, sizes, lambda item: item.born <= end < item.dies)
        made = self._clock.readings
        self._made = self._sums(placed, sizes, lambda item: bool(item.allocation.parameter) and item.dies == made)

    def _coefficients(self, size: Polynomial) -> Coefficients:
        known = dict(zip(size.powers, size.coefficients, strict=True))
        times = self._denominator // size.denominator
        return tuple(known.get(powers, 0) * times for powers in BILINEAR)

    def _sums(
        self, placed: Sequence[Placed], sizes: Mapping[Polynomial, Coefficients], chosen: Callable[[Placed], bool]
    ) -> list[Coefficients]:
        totals = [(0,) * len(BILINEAR)] * len(self._parts)
        for item in placed:
            if chosen(item):
                totals[item.part] = _add(totals[item.part], sizes[item.allocation.size])
        return totals

    def _peak(self, start: int, readings: int, base: Sequence[Coefficients]) -> sympy.Expr:
        below = (0,) * len(BILINEAR)
        for item in base:
            below = _add(below, item)
        lines = {
            tuple(a - b for a, b in zip(alive, below, strict=True)) for alive in self._alive[start : start + readings]
        }
        found = [self._expression(line) for line in undominated(BILINEAR, lines)] or [sympy.S.Zero]
        return found[0] if len(found) == 1 else sympy.Max(*found, evaluate=False)

    def _expression(self, line: Coefficients) -> sympy.Expr:
        return Polynomial(BILINEAR, line, self._denominator).expression

    def forward_peak(self, part: int) -> sympy.Expr:
        """The most in a part's forward, beyond the saved bytes of all parts before it."""
        start = self._clock.at(part, "forward", 0)
        return self._peak(start, self._parts[part].forward_positions + 1, self._saved[:part])

    def backward_peak(self, part: int) -> sympy.Expr:
        """The most in a part's backward, beyond saved bytes up to its own and gradients that later parts made."""
        start = self._clock.at(part, "backward", 0)
        base = (*self._saved[: part + 1], *self._made[part + 1 :])
        return self._peak(start, self._parts[part].backward_positions + 1, base)


def _add(one: Coefficients, other: Coefficients) -> Coefficients:
    return tuple(a + b for a, b in zip(one, other, strict=True))
