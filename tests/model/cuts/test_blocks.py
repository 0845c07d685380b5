import pytest
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.cuts.blocks import container_of, find_blocks
from tests import zoo


@pytest.mark.parametrize(
    ("name", "container", "count"),
    [
        ("gpt2", "model.transformer.h", 4),
        ("llama", "model.model.layers", 4),
        ("bert", "model.bert.encoder.layer", 4),
        ("mixtral", "model.model.layers", 4),
        ("nano", "transformer.h", 4),
        ("encoder", "encoder.layers", 4),
        ("uneven", "blocks", 4),
        ("batch_norm", "net", 4),
    ],
)
def test_one_container(name, container, count):
    module, _ = zoo.make(name)
    blocks = find_blocks(module)
    assert len(blocks) == count
    assert {container_of(block) for block in blocks} == {container}


def test_encoder_and_decoder():
    containers = {container_of(block) for block in find_blocks(zoo.make("t5")[0])}
    assert containers == {"model.encoder.block", "model.decoder.block"}


def test_stages_of_different_width_hold_the_blocks():
    blocks = find_blocks(zoo.make("swin")[0])
    assert len(blocks) == 4
    assert len({container_of(block) for block in blocks}) == 2


def test_a_shared_block_is_named_once():
    block = zoo.small_block()
    assert find_blocks(nn.ModuleList([block, zoo.small_block(), block])) == ("0", "1")


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.ModuleList([zoo.small_block()]),
        nn.ModuleList([nn.ReLU(), nn.ReLU()]),
    ],
    ids=["layer", "perceptron", "one child", "no parameters"],
)
def test_no_blocks(module):
    assert find_blocks(module) == ()


def test_blocks_by_name():
    module, _ = zoo.make("t5")
    decoder = tuple(f"model.decoder.block.{i}" for i in range(3))
    assert find_blocks(module, "model.decoder.block") == decoder
    assert find_blocks(module, "model.decoder.block.*") == decoder
    assert len(find_blocks(module, "T5Block")) == 6
    assert find_blocks(module, "model.decoder.block.0, model.decoder.block.2") == decoder[::2]


def test_names_that_lead_nowhere():
    module, _ = zoo.make("nano")
    with pytest.raises(TraceError, match=r"blocks='transformer\.layers': 'transformer\.layers' names no module"):
        find_blocks(module, "transformer.layers")
    with pytest.raises(TraceError, match=r"transformer\.h\.0\.attn lies inside transformer\.h\.0"):
        find_blocks(module, "transformer.h, Attention")
