"""Exact polynomials in microbatch rows and sequence length: sizes of which there are hundreds per layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from math import comb, gcd
from operator import ge, mul

import sympy

MICROBATCH = sympy.Symbol("b", positive=True, integer=True)
"""Rows of one microbatch on one data-parallel rank."""

SEQUENCE = sympy.Symbol("s", positive=True, integer=True)
"""Length of the sequence dimension, if the batch has one; otherwise no expression contains it."""

Powers = tuple[int, int]
"""Exponents of rows and length in a monomial."""

_ONE: tuple[Powers, ...] = ((0, 0),)


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of monomials with rational coefficients over one denominator; cheap to make, to compare and to evaluate."""

    powers: tuple[Powers, ...]
    coefficients: tuple[int, ...]  # of each monomial, times :attr:`denominator`
    denominator: int = 1

    @classmethod
    def constant(cls, value: int) -> "Polynomial":
        """A polynomial of one value for all sizes."""
        return cls(_ONE, (value,))

    @property
    def expression(self) -> sympy.Expr:
        """The polynomial as a sympy expression in :data:`MICROBATCH` and :data:`SEQUENCE`."""
        terms = (
            sympy.Rational(c, self.denominator) * MICROBATCH**i * SEQUENCE**j
            for c, (i, j) in zip(self.coefficients, self.powers, strict=True)
            if c
        )
        return sympy.Add(*terms)

    def at(self, rows: int, length: int = 1) -> int:
        """The value for ``rows`` rows of ``length`` positions; a ValueError if it is no whole number."""
        value = self.exactly_at(rows, length)
        if value.denominator != 1:
            raise ValueError(f"rows = {rows}, length = {length}: {self.expression} is {value} there, no whole number")
        return value.numerator

    def exactly_at(self, rows: int, length: int = 1) -> Fraction:
        """The value as a fraction, which need not be whole between the sizes that a network allows."""
        total = sum(c * rows**i * length**j for c, (i, j) in zip(self.coefficients, self.powers, strict=True) if c)
        return Fraction(total, self.denominator)


def values_at(polynomials: Sequence[Polynomial], rows: int, length: int = 1) -> list[int]:
    """Values of many polynomials, of which many are equal, at one size; a ValueError as of ``at``."""
    known = {item: item.at(rows, length) for item in {*polynomials}}
    return [known[item] for item in polynomials]


@lru_cache(maxsize=4096)
def bytes_at(expression: sympy.Expr, rows: int, length: int) -> int:
    """A size in bytes as an expression, for so many rows of a length."""
    return int(expression.subs({MICROBATCH: rows, SEQUENCE: length}))


# Exact polynomials through measured integers.
#
# A count taken at several sizes is interpolated with rational arithmetic over a fixed set of monomials in rows ``b``
# and sequence length ``s`` and checked at one more size: an expression is exact or it is refused.

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
        """Rows of the interpolation matrix, as integers over :attr:`denominator`."""
        matrix = self._rational_inverse * self.denominator
        return tuple(tuple(int(x) for x in matrix.row(i)) for i in range(matrix.rows))

    @cached_property
    def _rational_inverse(self) -> sympy.Matrix:
        return sympy.Matrix([[b**i * s**j for i, j in self.powers] for b, s in self.points]).inv()

    @cached_property
    def denominator(self) -> int:
        """What :data:`Coefficients` are over."""
        return int(sympy.ilcm(1, *(x.q for x in self._rational_inverse)))

    def _value(self, coefficients: Coefficients, point: Point) -> Fraction:
        return Polynomial(self.powers, coefficients, self.denominator).exactly_at(*point)

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
        return tuple(count * self.denominator if powers == (0, 0) else 0 for powers in self.powers)

    def is_at(self, coefficients: Coefficients, point: Point, count: int) -> bool:
        """Whether a polynomial has a value at one size."""
        return self._value(coefficients, point) == count

    def polynomial(self, coefficients: Coefficients) -> Polynomial:
        """The polynomial in lowest terms, without monomials that do not occur."""
        shared = gcd(self.denominator, *coefficients)
        terms = [(c // shared, powers) for c, powers in zip(coefficients, self.powers, strict=True) if c]
        if not terms:
            return Polynomial.constant(0)
        return Polynomial(tuple(p for _, p in terms), tuple(c for c, _ in terms), self.denominator // shared)

    def expression(self, coefficients: Coefficients) -> sympy.Expr:
        """The polynomial for sympy."""
        return self.polynomial(coefficients).expression

    def fit(self, counts: Sequence[int], name: str) -> sympy.Expr:
        """The exact expression of counts at :attr:`sizes`; see :meth:`interpolate`."""
        return self.expression(self.interpolate(counts, name))


def highest(powers: tuple[Powers, ...], timeline: Iterable[Coefficients], denominator: int) -> sympy.Expr:
    """The ``Max`` of the polynomials of a timeline that no other one exceeds for all rows and lengths from 1 on.

    Such is a difference without negative coefficients in ``b - 1`` and ``s - 1``.
    """
    kept: list[tuple[Coefficients, Coefficients]] = []
    # Whatever dominates has the larger sum of shifted coefficients, so it comes first.
    shifted = {tuple(sum(map(mul, row, p)) for row in _shifts(powers)): p for p in set(timeline)}
    for mine in sorted(shifted, key=lambda key: (sum(key), key), reverse=True):
        if not any(all(map(ge, other, mine)) for other, _ in kept):
            kept.append((mine, shifted[mine]))
    found = [Polynomial(powers, line, denominator).expression for line in sorted(line for _, line in kept)]
    return found[0] if len(found) == 1 else sympy.Max(*found, evaluate=False)


@cache
def _shifts(powers: tuple[Powers, ...]) -> tuple[tuple[int, ...], ...]:
    """The matrix that rewrites a polynomial in ``b - 1`` and ``s - 1``."""
    targets = sorted({(k, m) for i, j in powers for k in range(i + 1) for m in range(j + 1)})
    return tuple(tuple(comb(i, k) * comb(j, m) for i, j in powers) for k, m in targets)


def _text(point: Point) -> str:
    return f"(b={point[0]}, s={point[1]})"
