"""Exact polynomials in microbatch rows and sequence length: sizes of which there are hundreds per layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

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
    """Values of many polynomials, which mostly share their monomials, at one size; a ValueError as of ``at``."""
    known: dict[tuple[tuple[Powers, ...], tuple[int, ...], int], int] = {}
    monomials: dict[tuple[Powers, ...], tuple[int, ...]] = {}
    values = []
    for item in polynomials:
        key = (item.powers, item.coefficients, item.denominator)
        if key not in known:
            if item.powers not in monomials:
                monomials[item.powers] = tuple(rows**i * length**j for i, j in item.powers)
            total = sum(c * m for c, m in zip(item.coefficients, monomials[item.powers], strict=True))
            value, rest = divmod(total, item.denominator)
            known[key] = value if not rest else item.at(rows, length)
        values.append(known[key])
    return values


@lru_cache(maxsize=4096)
def bytes_at(expression: sympy.Expr, rows: int, length: int) -> int:
    """A size in bytes as an expression, for so many rows of a length."""
    return int(expression.subs({MICROBATCH: rows, SEQUENCE: length}))
