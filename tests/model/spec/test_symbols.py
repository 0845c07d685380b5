import pickle

import pytest
import sympy

from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE


@pytest.mark.parametrize("symbol", [MICROBATCH, SEQUENCE])
def test_sizes_are_known_to_be_whole_and_at_least_one(symbol):
    assert sympy.Max(symbol, 0) == symbol
    assert sympy.floor(symbol / 2 * 2) == symbol
    assert (symbol >= 1) == sympy.true
    assert pickle.loads(pickle.dumps(symbol)) == symbol


def test_rows_and_length_are_told_apart():
    assert (MICROBATCH * SEQUENCE**2).free_symbols == {MICROBATCH, SEQUENCE}
    assert (MICROBATCH - SEQUENCE) != 0
