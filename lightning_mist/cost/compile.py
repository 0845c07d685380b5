"""From sympy expressions to one numpy function that evaluates all of them for many configurations at once."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def _maximum(*values: Any) -> Any:
    return reduce(np.maximum, values)


def _minimum(*values: Any) -> Any:
    return reduce(np.minimum, values)


def compile_expressions(
    expressions: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]
) -> Callable[..., FloatArray]:
    """One vectorised function for all expressions, with their common parts computed once.

    Args:
        expressions: Expressions in ``symbols``; ``Max``, ``Min`` and ``Piecewise`` may occur.
        symbols: Arguments of the function, in order.

    Returns:
        A function of as many numbers or arrays as there are symbols. It returns an array of shape
        ``(len(expressions), *shape)``, where ``shape`` is that of its broadcast arguments.

    Raises:
        ValueError: If an expression contains another symbol.
    """
    known = set(symbols)
    for expression in expressions:
        foreign = sorted(str(symbol) for symbol in sympy.sympify(expression).free_symbols - known)
        if foreign:
            raise ValueError(
                f"expression {expression} contains {', '.join(foreign)}: only "
                f"{', '.join(str(symbol) for symbol in symbols)} may occur; substitute the others first"
            )
    function = sympy.lambdify(
        list(symbols), list(expressions), modules=[{"Max": _maximum, "Min": _minimum}, "numpy"], cse=True
    )

    def evaluate(*arguments: npt.ArrayLike) -> FloatArray:
        # numpy's select, to which Piecewise compiles, wants arrays even for one configuration.
        arrays = np.broadcast_arrays(*(np.asarray(argument, dtype=np.float64) for argument in arguments))
        shape = arrays[0].shape if arrays else ()
        values = function(*(np.atleast_1d(array) for array in arrays))
        result = np.empty((len(expressions), *shape), dtype=np.float64)
        for index, value in enumerate(values):
            result[index] = np.reshape(value, shape) if np.size(value) == np.prod(shape, dtype=int) else value
        return result

    return evaluate
