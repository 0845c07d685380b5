"""The symbols of every cost expression."""

from functools import lru_cache

import sympy

MICROBATCH = sympy.Symbol("b", positive=True, integer=True)
"""Rows of one microbatch on one data-parallel rank."""

SEQUENCE = sympy.Symbol("s", positive=True, integer=True)
"""Length of the sequence dimension, if the batch has one; otherwise no expression contains it."""


@lru_cache(maxsize=4096)
def bytes_at(expression: sympy.Expr, rows: int, length: int) -> int:
    """Bytes that an expression says for a number of rows and tokens per row."""
    return int(expression.subs({MICROBATCH: rows, SEQUENCE: length}))
