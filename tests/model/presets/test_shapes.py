import dataclasses

import pytest

from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.model.presets.shapes import LanguageModelShape

SHAPE = LanguageModelShape(hidden=96, ffn=256, layers=2, heads=4, vocabulary=100)


def test_every_query_has_a_key_and_a_value_of_its_own_unless_told_otherwise():
    assert SHAPE.head_width == 24
    assert SHAPE.key_value_width == SHAPE.hidden
    assert dataclasses.replace(SHAPE, key_value_heads=1).key_value_width == 24
    assert dataclasses.replace(SHAPE, key_value_heads=2).key_value_width == 48


@pytest.mark.parametrize(("fraction", "width"), [(0.0, 0), (0.25, 6), (0.3, 6), (0.35, 8), (1.0, 24)])
def test_pairs_of_entries_are_rotated(fraction, width):
    assert dataclasses.replace(SHAPE, rotary_fraction=fraction).rotated_width == width


@pytest.mark.parametrize("name", PRESETS)
def test_heads_of_presets_fill_their_width(name):
    shape = PRESETS[name]
    assert shape.heads * shape.head_width == shape.hidden
    assert shape.heads % (shape.key_value_heads or 1) == 0
    assert 0 <= shape.rotated_width <= shape.head_width
    assert shape.rotated_width % 2 == 0
