"""Exact polynomials through measured integers.

A count taken at several sizes is interpolated with rational arithmetic over a fixed set of monomials in rows ``b`` and
sequence length ``s`` and checked at one more size: an expression is exact or it is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import comb, gcd
from operator import ge, mul

import sympy

from lightning_mist.model.spec.polynomial import Polynomial, Powers

Point = tuple[int, int]
"""Rows and sequence length of one run (length 1 where there is no sequence)."""

Coefficients = tuple[int, ...]
"""Coefficients of the monomials of a :class:`Basis`, over its common denominator."""

BILINEAR: tuple[Powers, ...] = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
"""``{1, b, s, b s, s^2, b s^2}``: what attention over sequences costs."""

QUADRATIC: tuple[Powers, ...] = ((0, 0), (1, 0), (2, 0))
"""``{1, b, b^2}``: without a sequence; the square is for losses that compare rows."""

CONSTANT: tuple[Powers, ...] = ((0, 0),)
"""Nothing can be varied."""


class MisfitError(Exception):
    """Counts that no polynomial of the chosen monomials passes through; the message names the count."""


@dataclass(frozen=True)
class Basis:
    """Monomials, as many points to interpolate at, and one to check (``None`` only for a constant)."""

    powers: tuple[Powers, ...]
    points: tuple[Point, ...]
    check: Point | None

    @property
    def sizes(self) -> tuple[Point, ...]:
        """All points, the check last."""
        return self.points if self.check is None else (*self.points, self.check)

    @cached_property
    def _inverse(self) -> tuple[tuple[int, ...], ...]:
        """Rows of the interpolation matrix, as integers over :attr:`_denominator`."""
        matrix = self._rational_inverse * self._denominator
        return tuple(tuple(int(x) for x in matrix.row(i)) for i in range(matrix.rows))

    @cached_property
    def _rational_inverse(self) -> sympy.Matrix:
        return sympy.Matrix([[b**i * s**j for i, j in self.powers] for b, s in self.points]).inv()

    @cached_property
    def _denominator(self) -> int:
        return int(sympy.ilcm(1, *(x.q for x in self._rational_inverse)))

    def _value(self, coefficients: Coefficients, point: Point) -> Fraction:
        b, s = point
        total = sum(c * b**i * s**j for c, (i, j) in zip(coefficients, self.powers, strict=True))
        return Fraction(total, self._denominator)

    def interpolate(self, counts: Sequence[int], name: str) -> Coefficients:
        """Coefficients of the exact polynomial of counts at :attr:`sizes`; a :class:`MisfitError` if there is none."""
        coefficients = tuple(sum(map(mul, row, counts[: len(self.points)])) for row in self._inverse)
        if self.check is not None and (found := self._value(coefficients, self.check)) != counts[-1]:
            raise MisfitError(
                f"{name} is {counts[-1]} at {_text(self.check)}, the polynomial through "
                f"{', '.join(map(_text, self.points))} says {found}"
            )
        return coefficients

    def constant(self, count: int) -> Coefficients:
        """Coefficients of what is the same at all sizes."""
        return tuple(count * self._denominator if powers == (0, 0) else 0 for powers in self.powers)

    def is_at(self, coefficients: Coefficients, point: Point, count: int) -> bool:
        """Whether a polynomial has a value at one size."""
        return self._value(coefficients, point) == count

    def polynomial(self, coefficients: Coefficients) -> Polynomial:
        """The polynomial in lowest terms, without monomials that do not occur."""
        shared = gcd(self._denominator, *coefficients)
        terms = [(c // shared, powers) for c, powers in zip(coefficients, self.powers, strict=True) if c]
        if not terms:
            return Polynomial.constant(0)
        return Polynomial(tuple(p for _, p in terms), tuple(c for c, _ in terms), self._denominator // shared)

    def expression(self, coefficients: Coefficients) -> sympy.Expr:
        """The polynomial for sympy."""
        return self.polynomial(coefficients).expression

    def fit(self, counts: Sequence[int], name: str) -> sympy.Expr:
        """The exact expression of counts at :attr:`sizes`; see :meth:`interpolate`."""
        return self.expression(self.interpolate(counts, name))

    def peak(self, timeline: Iterable[Coefficients]) -> sympy.Expr:
        """The ``Max`` of the polynomials of a timeline that no other one exceeds for all rows and lengths from 1 on."""
        expressions = [self.expression(c) for c in undominated(self.powers, set(timeline))]
        return expressions[0] if len(expressions) == 1 else sympy.Max(*expressions, evaluate=False)


def undominated(powers: tuple[Powers, ...], polynomials: Iterable[Coefficients]) -> list[Coefficients]:
    """Polynomials that no other one exceeds for all rows and lengths from 1 on.

    Such is a difference without negative coefficients in ``b - 1`` and ``s - 1``.
    """
    kept: list[tuple[Coefficients, Coefficients]] = []
    # Whatever dominates has the larger sum of shifted coefficients, so it comes first.
    shifted = {tuple(sum(map(mul, row, p)) for row in _shifts(powers)): p for p in polynomials}
    for mine in sorted(shifted, key=lambda key: (sum(key), key), reverse=True):
        if not any(all(map(ge, other, mine)) for other, _ in kept):
            kept.append((mine, shifted[mine]))
    return sorted(polynomial for _, polynomial in kept)


@cache
def _shifts(powers: tuple[Powers, ...]) -> tuple[tuple[int, ...], ...]:
    """The matrix that rewrites a polynomial in ``b - 1`` and ``s - 1``."""
    targets = sorted({(k, m) for i, j in powers for k in range(i + 1) for m in range(j + 1)})
    return tuple(tuple(comb(i, k) * comb(j, m) for i, j in powers) for k, m in targets)


def _text(point: Point) -> str:
    return f"(b={point[0]}, s={point[1]})"
