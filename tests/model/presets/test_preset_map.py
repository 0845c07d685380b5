from math import prod

import pytest

from lightning_mist.model import derive_contexts, derive_splits, map_module
from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.model.presets.specs import divides, parameters, preset_map
from lightning_mist.model.sources.text_sources import open_model
from tests.model.presets.test_specs import shape_of


@pytest.mark.parametrize("family", ["gpt3", "falcon", "llama3"])
def test_it_is_what_tracing_finds(monkeypatch, family):
    shape = shape_of(family, hidden=256, ffn=640, heads=8)
    monkeypatch.setitem(PRESETS, "small", shape)
    source = open_model("small", batch_rows=4, sequence_length=64, precision="32-true")
    one = tuple(each[:3] for each in source.batch)
    found = map_module(source.module, source.call, source.batch, second_batch=one)
    for derive, degrees in ((derive_splits, (2,)), (derive_contexts, (2, 3))):
        found = derive(source.module, source.call, source.batch, found, degrees)
    mine = preset_map(shape, rows=4, length=64, degrees=(2,), contexts=(2, 3), dtype="float32")
    for name in ("step", "blocks", "cuts", "parameters", "leaking_blocks", "exclusions", "batch_rows", "splits"):
        assert getattr(mine, name) == getattr(found, name)
    assert mine.contexts == found.contexts
    assert [degree for degree, _ in mine.uncontexts] == [degree for degree, _ in found.uncontexts] == [3]


def test_what_devices_can_share():
    shape = shape_of("llama3")
    assert divides(shape, 8)
    assert not divides(shape, 16)
    assert preset_map(shape, rows=1, length=8, degrees=(16,), dtype="float32").unsplit == (
        (16, "16 does not divide 16 heads, 8 heads of keys and values, the inner width 832 or the vocabulary of 1000"),
    )


def test_parameters_of_large_presets_are_as_many_as_published():
    def billions(name):
        return sum(prod(sizes) for _, sizes, _ in parameters(PRESETS[name], 2048)) / 1e9

    assert billions("gpt3-175b") == pytest.approx(175, rel=0.01)
    assert billions("gpt3-145b") == pytest.approx(145.6, rel=0.01)
    assert billions("llama3-8b") == pytest.approx(8.03, rel=0.005)
    assert billions("llama3-70b") == pytest.approx(70.6, rel=0.005)
    assert billions("llama-405b") == pytest.approx(405, rel=0.005)
    assert billions("llama-65b") == pytest.approx(65.2, rel=0.01)
