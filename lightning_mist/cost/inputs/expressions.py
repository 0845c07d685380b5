"""From sympy expressions to one numpy function that evaluates all of them for many configurations at once.

Sizes of a network are polynomials of few monomials, or the largest of several polynomials. So all of them together are
a matrix of coefficients times a vector of monomials, which takes milliseconds to make of hundreds of expressions:
generating and compiling code takes a hundred times as long. What is no polynomial is one more variable of those that it
is a part of; the least and the largest of several are made of these, and for anything else code is generated.

Array axes
    K  configurations
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import sympy

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Monomial: TypeAlias = tuple[tuple[int, int], ...]
"""Variables and their powers, ascending by variable; nothing for a constant."""

Polynomial: TypeAlias = dict[Monomial, Any]
"""Coefficients, exact as far as those of the expression are, by monomial."""

_Variable: TypeAlias = Callable[[Sequence[FloatArray]], FloatArray]
"""A variable made of those before it."""

_CHOOSING: dict[type, Callable[[Any, Any], Any]] = {sympy.Max: np.maximum, sympy.Min: np.minimum}


def _maximum(*values: Any) -> Any:
    return reduce(np.maximum, values)


def _minimum(*values: Any) -> Any:
    return reduce(np.minimum, values)


@dataclass(slots=True)
class _Variables:
    """Variables of polynomials: the symbols first, then what is no polynomial; and what has been found of expressions.

    Attributes:
        place: The variable of each symbol, and of everything that is no polynomial.
        made: How each of those behind the symbols is made.
    """

    symbols: Sequence[sympy.Symbol]
    place: dict[sympy.Expr, int]
    made: list[_Variable] = field(default_factory=list)
    known: dict[sympy.Expr, Polynomial] = field(default_factory=dict)

    def polynomial(self, expression: sympy.Expr) -> Polynomial:
        """An expression as a polynomial of the variables, of which it may need more."""
        if expression not in self.known:
            self.known[expression] = self._read(expression)
        return self.known[expression]

    def _read(self, expression: sympy.Expr) -> Polynomial:
        if expression.is_Rational:
            number = Fraction(int(expression.p), int(expression.q))
            return {(): number} if number else {}
        if expression.is_Float:
            return {(): float(expression)}
        if expression.is_Add:
            return _sum(map(self.polynomial, expression.args))
        if expression.is_Mul:
            return reduce(_product, map(self.polynomial, expression.args))
        if expression.is_Pow and expression.exp.is_Integer and expression.base in self.place:
            return {((self.place[expression.base], int(expression.exp)),): 1}
        if expression not in self.place:
            made = self._make(expression)
            self.place[expression] = len(self.symbols) + len(self.made)
            self.made.append(made)
        return {((self.place[expression], 1),): 1}

    def _make(self, expression: sympy.Expr) -> _Variable:
        """How to make something that is no polynomial."""
        choose = _CHOOSING.get(type(expression))
        if choose is not None:
            parts = [self.polynomial(argument) for argument in expression.args]
            return lambda variables: reduce(choose, (_value(part, variables) for part in parts))
        count = len(self.symbols)
        function = sympy.lambdify(list(self.symbols), expression, modules=[{"Max": _maximum, "Min": _minimum}, "numpy"])
        return lambda variables: np.asarray(function(*variables[:count]), dtype=np.float64)


def _sum(parts: Iterable[Polynomial]) -> Polynomial:
    result: Polynomial = {}
    for part in parts:
        for monomial, coefficient in part.items():
            result[monomial] = result.get(monomial, 0) + coefficient
    return result


def _product(first: Polynomial, second: Polynomial) -> Polynomial:
    return _sum({_times(one, other): a * b} for one, a in first.items() for other, b in second.items())


def _times(first: Monomial, second: Monomial) -> Monomial:
    if not (first and second):
        return first or second
    powers = dict(first)
    for variable, power in second:
        powers[variable] = powers.get(variable, 0) + power
    return tuple(sorted((variable, power) for variable, power in powers.items() if power))


def _monomial(monomial: Monomial, variables: Sequence[FloatArray]) -> FloatArray:
    result: FloatArray = np.ones_like(variables[0]) if variables else np.ones(1)
    for variable, power in monomial:
        result = result * (variables[variable] if power == 1 else variables[variable] ** float(power))
    return result


def _value(polynomial: Polynomial, variables: Sequence[FloatArray]) -> FloatArray:
    values = (float(coefficient) * _monomial(monomial, variables) for monomial, coefficient in polynomial.items())
    return reduce(np.add, values, np.zeros(1))


def compile_expressions(
    expressions: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]
) -> Callable[..., FloatArray]:
    """One vectorised function for all expressions, with their common parts computed once.

    Args:
        expressions: Expressions in ``symbols``; ``Max``, ``Min`` and ``Piecewise`` may occur.

    Returns:
        A function of as many numbers or arrays as there are symbols. It returns an array of shape
        ``(len(expressions), *shape)``, where ``shape`` is that of its broadcast arguments.

    Raises:
        ValueError: If an expression contains another symbol.
    """
    known = set(symbols)
    given = [sympy.sympify(expression) for expression in expressions]
    for expression in dict.fromkeys(given):
        foreign = sorted(str(symbol) for symbol in expression.free_symbols - known)
        if foreign:
            raise ValueError(
                f"expression {expression} contains {', '.join(foreign)}: only "
                f"{', '.join(str(symbol) for symbol in symbols)} may occur; substitute the others first"
            )
    variables = _Variables(symbols, {symbol: index for index, symbol in enumerate(symbols)})
    polynomials = [variables.polynomial(expression) for expression in given]
    monomials = tuple(dict.fromkeys(monomial for polynomial in polynomials for monomial in polynomial))
    place = {monomial: index for index, monomial in enumerate(monomials)}
    coefficients = np.zeros((len(given), len(monomials)))
    for row, polynomial in enumerate(polynomials):
        for monomial, coefficient in polynomial.items():
            coefficients[row, place[monomial]] = float(coefficient)

    def evaluate(*arguments: npt.ArrayLike) -> FloatArray:
        arrays = np.broadcast_arrays(*(np.asarray(argument, dtype=np.float64) for argument in arguments))
        shape = arrays[0].shape if arrays else ()
        values = [array.reshape(-1) for array in arrays]
        for make in variables.made:
            values.append(make(values))
        count = arrays[0].size if arrays else 1
        values_by_monomial = np.empty((len(monomials), count))
        for index, monomial in enumerate(monomials):
            values_by_monomial[index] = _monomial(monomial, values)
        return (coefficients @ values_by_monomial).reshape(len(given), *shape)

    return evaluate
