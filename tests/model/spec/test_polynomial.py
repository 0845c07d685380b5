import pickle
import random
from itertools import product

import pytest
import sympy

from lightning_mist.model.spec.polynomial import (
    BILINEAR,
    CONSTANT,
    QUADRATIC,
    Basis,
    MisfitError,
    Polynomial,
    highest,
    values_at,
)
from lightning_mist.model.spec.polynomial import MICROBATCH as B
from lightning_mist.model.spec.polynomial import SEQUENCE as S

HALF = Polynomial(((0, 0), (1, 1), (1, 2)), (6, 1, 1), 2)
"""3 + (b s + b s^2) / 2."""


def test_values_and_expression_are_those_of_the_same_polynomial() -> None:
    assert sympy.expand(HALF.expression - (3 + B * S * (S + 1) / 2)) == 0
    for rows, length in ((1, 1), (2, 5), (7, 4096)):
        assert HALF.at(rows, length) == HALF.expression.subs({B: rows, S: length})
    assert Polynomial.constant(12).at(5, 7) == 12
    assert Polynomial.constant(0).expression == 0


def test_a_size_at_which_it_is_no_whole_number_is_refused() -> None:
    third = Polynomial(((1, 0),), (1,), 3)
    assert third.at(6) == 2
    with pytest.raises(ValueError, match=r"rows = 4, length = 1: b/3 is 4/3 there, no whole number"):
        third.at(4)
    with pytest.raises(ValueError, match="no whole number"):
        values_at([third], 4)


def test_many_at_once_are_what_each_is_by_itself() -> None:
    many = [HALF, Polynomial.constant(4), HALF, Polynomial(((1, 0), (0, 1)), (2, -1))]
    assert values_at(many, 3, 5) == [item.at(3, 5) for item in many]


def test_they_are_equal_by_value_and_survive_pickling() -> None:
    same = pickle.loads(pickle.dumps(HALF))
    assert same == HALF
    assert hash(same) == hash(HALF)


BASIS = Basis(BILINEAR, tuple((b, s) for s in (16, 8, 4) for b in (2, 4)), (6, 12))


def at(expression: sympy.Expr, b: int, s: int) -> int:
    return int(expression.subs({B: b, S: s}))


@pytest.mark.parametrize(
    "expression", [7 * B * S**2 + 3 * B * S - 5 * S + 11, sympy.Integer(0), B * S * (S + 1) / 2, -4 * S**2]
)
def test_a_polynomial_comes_back_exactly(expression: sympy.Expr) -> None:
    counts = [at(expression, b, s) for b, s in BASIS.sizes]
    assert sympy.expand(BASIS.fit(counts, "it") - expression) == 0


def test_what_is_no_polynomial_of_the_monomials_is_refused_with_its_name_and_numbers() -> None:
    counts = [b**2 * s for b, s in BASIS.sizes]
    with pytest.raises(MisfitError, match=r"saved bytes is 432 at \(b=6, s=12\), the polynomial .* says"):
        BASIS.fit(counts, "saved bytes")


def test_rows_alone_may_enter_squared() -> None:
    basis = Basis(QUADRATIC, ((2, 1), (4, 1), (6, 1)), (8, 1))
    assert basis.fit([3 * b * b + b for b, _ in basis.sizes], "it") == 3 * B**2 + B


def test_a_constant_needs_one_size() -> None:
    assert Basis(CONSTANT, ((5, 1),), None).fit([42], "it") == 42


def fitted(events: list[sympy.Expr]) -> list[tuple[int, ...]]:
    return [BASIS.interpolate([at(e + sympy.S.Zero, b, s) for b, s in BASIS.sizes], "event") for e in events]


def test_coefficients_become_polynomials_in_lowest_terms() -> None:
    half = BASIS.polynomial(fitted([B * S * (S + 1) / 2])[0])
    assert (half.powers, half.coefficients, half.denominator) == (((1, 1), (1, 2)), (1, 1), 2)
    assert BASIS.polynomial(BASIS.constant(0)).at(3, 5) == 0
    assert BASIS.polynomial(BASIS.constant(12)).at(3, 5) == 12


def test_a_polynomial_is_known_to_have_a_value_at_a_size() -> None:
    (line,) = fitted([3 * B * S])
    assert BASIS.is_at(line, (2, 5), 30)
    assert not BASIS.is_at(line, (2, 5), 31)


def test_a_peak_is_the_max_of_lines_that_no_other_exceeds() -> None:
    events = [100 + B * S, 3 * B * S, 50 + B * S, 2 * B * S, 90 + 2 * S]
    assert set(highest(BASIS.powers, fitted(events), BASIS.denominator).args) == {100 + B * S, 3 * B * S, 90 + 2 * S}


def test_a_peak_equals_the_largest_event_everywhere_though_most_events_are_dropped() -> None:
    rng = random.Random(0)
    terms = [sympy.S.One, B, S, B * S, S**2, B * S**2]
    events = [sum(rng.randint(-9, 9) * t for t in terms) for _ in range(40)]
    peak = highest(BASIS.powers, fitted(events), BASIS.denominator)
    assert len(peak.args) < len(events)
    for b, s in product((1, 2, 7, 100), (1, 3, 64, 2000)):
        assert at(peak, b, s) == max(at(e, b, s) for e in events)
