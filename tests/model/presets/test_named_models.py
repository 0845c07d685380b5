import dataclasses

import pytest

from lightning_mist.model.presets.named_models import PRESETS, LanguageModelShape
from lightning_mist.model.sources.reference_decoder import LanguageModel, hollow

BLOCK_AND_TOTAL = {  # parameters of a block, and of all blocks and the two token tables
    "gpt3-1.3b": (50339840, 1414201344),
    "gpt3-22b": (453009408, 22362587136),
    "falcon-7b": (201334784, 6854803456),
    "falcon-40b": (805322752, 39479672832),
    "llama-350m": (12847104, 411353088),
    "llama-13b": (317204480, 13203292160),
    "llama-70b": (973094912, 78671773696),
}


@pytest.mark.parametrize("name", BLOCK_AND_TOTAL)
def test_parameters_are_as_many_as_published(name):
    model = hollow(lambda: LanguageModel(PRESETS[name], 2048))
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    tables = model.tokens.weight.numel() + model.head.weight.numel()
    assert (block, block * len(model.blocks) + tables) == BLOCK_AND_TOTAL[name]


def test_names():
    assert {"gpt3-22b", "llama-7b", "falcon-2.7b"} <= set(PRESETS)
    assert all(shape.hidden % shape.heads == 0 for shape in PRESETS.values())


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
