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


@pytest.mark.parametrize(
    "expression",
    [
        (B + 2 * S) * (3 * S**2 - B) + 5,
        (B + S) ** 3,
        B**2 / S + S / B,
        sympy.Max(B * S, sympy.Min(3 * B, S + 7) + 2, evaluate=False) * (B - S),
        2**40 * B * S**2 - 2**40 * B**2 * S + 1,
        8 * sympy.ceiling(B / 8) * S + sympy.sqrt(S),
        sympy.Max(sympy.Piecewise((1, S > 7), (S**2, True)), B),
        sympy.Float(0.25) * B + sympy.Rational(1, 7) * S + sympy.pi,
    ],
)
def test_all_kinds_of_expressions_equal_substitution(expression):
    b, s = np.arange(1, 13), np.array([[3], [8], [1024]])
    values = compile_expressions([expression, expression + B], [B, S])(b, s)
    wanted = [[float(expression.subs({B: row, S: length})) for row in range(1, 13)] for length in (3, 8, 1024)]
    np.testing.assert_allclose(values[0], wanted, rtol=1e-13)
    np.testing.assert_allclose(values[1], np.array(wanted) + b, rtol=1e-13)


def test_whole_numbers_are_exact():
    expressions = [B * (S + 3) - 2 * B * S, sympy.Max(123_456_789 * B * S, S)]
    values = compile_expressions(expressions, [B, S])(97, 4096)
    assert values.tolist() == [97 * (4096 + 3) - 2 * 97 * 4096, 123_456_789 * 97 * 4096]


def test_no_symbols_and_no_expressions():
    assert compile_expressions([sympy.Integer(4), sympy.S.Zero], [])().tolist() == [4.0, 0.0]
    assert compile_expressions([], [B])(np.ones(3)).shape == (0, 3)
