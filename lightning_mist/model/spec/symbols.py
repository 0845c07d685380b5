"""The symbols of every cost expression."""

import sympy

MICROBATCH = sympy.Symbol("b", positive=True, integer=True)
"""Rows of one microbatch on one data-parallel rank."""

SEQUENCE = sympy.Symbol("s", positive=True, integer=True)
"""Length of the sequence dimension, if the batch has one; otherwise no expression contains it."""
