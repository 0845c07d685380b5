import numpy as np
import pytest

from lightning_mist.tuner.anywhere import Anywhere
from lightning_mist.tuner.lines import lines_of
from lightning_mist.tuner.suffixes import Suffixes
from tests.tuner.problems import random_family, slot

FAMILIES = [family for family in map(random_family, range(120)) if len(family.tails) > 1]


def open_ones():
    """Families with stages between others that may lie anywhere."""
    for family in FAMILIES:
        suffixes = Suffixes(family)
        if suffixes.middle and all(lines.steady_CR.shape[1] == 1 for lines in suffixes.middle):
            yield suffixes


def test_passes_are_the_same_as_line_by_line():
    compared = 0
    for suffixes in open_ones():
        plain = Suffixes(suffixes.family)
        plain._anywhere = None
        paces = suffixes.paces()
        for pace in paces[[len(paces) // 2, -1]].tolist():
            free = plain.walk(pace)
            caps = [None, *(factor * min(free.values.values()) for factor in (1.0, 1.1, 2.0) if free.values)]
            for cap in caps:
                found, wanted = suffixes.walk(pace, cap), plain.walk(pace, cap)
                assert found.values == wanted.values
                assert len(found.sums) == len(wanted.sums)
                for sums, others in zip(found.sums, wanted.sums, strict=True):
                    np.testing.assert_array_equal(sums, others)
                compared += bool(found.values)
    assert compared > 50


def test_what_stages_use_up_is_numbered_once():
    first = lines_of(slot([-1, -1, -1], [1, 2, 1], [1, 1, 1], [1.0, 2.0, 0.5], [0.0, 0.0, 4.0]), 5, (3,))
    other = lines_of(slot([-1, -1], [2, 3], [1, 2], [3.0, 1.0], [0.0, 0.0]), 5, (3,))
    found = Anywhere.of([first, other])
    assert list(zip(found.devices_E, found.layers_E, strict=True)) == [(1, 1), (1, 2), (2, 3)]
    assert found.stages[0].use_C.tolist() == [0, 0, 1]
    assert found.stages[0].is_fastest_C.tolist() == [True, False, True]
    assert found.stages[0].steady_C.tolist() == [0.5, 1.0, 2.0]
    # Only the slower of those that use up the same has a faster one.
    assert found.stages[0].faster_C.tolist() == pytest.approx([np.inf, 4.5, np.inf])
    assert found.stages[1].use_C.tolist() == [1, 2]


def test_stages_whose_place_matters_are_left_to_others():
    placed = lines_of(slot([1, 2], [1, 1], [1, 1], [1.0, 2.0], [0.0, 0.0]), 5, (3,))
    assert Anywhere.of([placed]) is None
    assert not Anywhere.of([]).stages
