from fractions import Fraction

import pytest

from benchmarks.planner.preset_forms import MONOMIALS, SIZES, product, reduced, small_sum
from lightning_mist.model.presets.named_models import LanguageModelShape
from lightning_mist.model.presets.specs import widths

NUMBERS = [widths(LanguageModelShape(layers=2, **sizes), length) for sizes, _, length in SIZES]
ROWS = [[product(name, numbers) for numbers in NUMBERS] for name in MONOMIALS["layer"]]


@pytest.mark.parametrize(
    "factors",
    [
        {"h": Fraction(3, 4)},
        {"": Fraction(130)},
        {"w": Fraction(18), "": Fraction(32)},
        {"h": Fraction(25, 2), "f": Fraction(8), "a": Fraction(4)},
        {"h h": Fraction(8), "h f": Fraction(4), "h": Fraction(6), "": Fraction(24)},
    ],
    ids=str,
)
def test_sums_are_found_from_three_sizes(factors):
    wanted = [factors.get(name, Fraction(0)) for name in MONOMIALS["layer"]]
    column = [sum(factor * row[size] for factor, row in zip(wanted, ROWS, strict=True)) for size in range(len(SIZES))]
    assert small_sum(column, ROWS) == wanted


def test_what_is_no_small_sum_is_refused():
    with pytest.raises(ValueError, match="no sum of"):
        small_sum([Fraction(1, 3), Fraction(2, 7), Fraction(1, 11)], ROWS)


def test_short_vectors():
    assert sorted(map(abs, reduced([[1, 1, 1], [-1, 0, 2], [3, 5, 6]])[0])) == [0, 0, 1]
