import pickle

import pytest
import sympy

from lightning_mist.model.spec.polynomial import MICROBATCH as B
from lightning_mist.model.spec.polynomial import SEQUENCE as S
from lightning_mist.model.spec.polynomial import Polynomial, values_at

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
