import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost import compile_expressions

B, S = sympy.symbols("b s", positive=True, integer=True)
EXPRESSIONS = [
    3 * B * S + 7,
    sympy.Max(B * S, 3 * B + 7, 10),
    sympy.Min(B, S),
    sympy.Piecewise((0, B <= 2), (B * S, True)),
    sympy.Integer(4),
    sympy.Rational(1, 3) * B**2 * S + sympy.Max(0, B - S),
]


@settings(deadline=None)
@given(b=st.integers(1, 100), s=st.integers(1, 100))
def test_equals_substitution(b, s):
    values = compile_expressions(EXPRESSIONS, [B, S])(b, s)
    assert values.shape == (len(EXPRESSIONS),)
    np.testing.assert_allclose(values, [float(e.subs({B: b, S: s})) for e in EXPRESSIONS], rtol=1e-14)


def test_evaluates_arrays_at_once():
    b, s = np.arange(1, 7).reshape(2, 3), np.array([1, 5, 9])
    values = compile_expressions(EXPRESSIONS, [B, S])(b, s)
    assert values.shape == (len(EXPRESSIONS), 2, 3)
    for (row, column), rows in np.ndenumerate(b):
        wanted = [float(e.subs({B: rows, S: s[column]})) for e in EXPRESSIONS]
        np.testing.assert_allclose(values[:, row, column], wanted, rtol=1e-14)


def test_a_foreign_symbol_is_named():
    with pytest.raises(ValueError, match="contains s: only b may occur"):
        compile_expressions([B * S], [B])
