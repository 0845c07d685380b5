import pytest

from lightning_mist.estimate.transformer_sizes import TransformerDims
from tests.cost.fujii import Degrees, Experts, fujii_estimate

LLAMA_3_8B = TransformerDims(hidden=4096, ffn=14336, layers=32, heads=32, key_value_heads=8, vocabulary=128256)


def estimate(*, literal=False, rows=1, length=8192, experts=None, **degrees):
    how = {"microbatch_size": rows, "sequence_length": length, "literal": literal, "experts": experts}
    return fujii_estimate(LLAMA_3_8B, Degrees(**degrees), **how)


def test_one_device_has_all_parameters():
    assert estimate().static_bytes == 18 * LLAMA_3_8B.parameters
    assert estimate(data=4, context=2).static_bytes == (6 + 12 / 8) * LLAMA_3_8B.parameters


def test_by_hand():
    # 41 hidden states per layer; behind the layers two of them and scores in 32 bits; ids.
    kept = 8192 * (4096 * (41 * 32 + 4) + 4 * 128256 + 8)
    assert estimate().activation_bytes == kept
    assert estimate(tensor=8, context=2).activation_bytes == 8192 / 2 * (4096 / 8 * (41 * 32 + 4) + 4 * 128256 / 8 + 8)
    assert estimate(rows=3).activation_bytes == 3 * kept


def test_stages_share_parameters_but_not_activations():
    alone, staged = estimate(), estimate(pipeline=4)
    one_table = 18 * (LLAMA_3_8B.parameters - 128256 * 4096 - 4096)
    matrices = one_table - 18 * 128256 * 4096
    assert staged.static_bytes == pytest.approx(18 * 128256 * 4096 + matrices / 4)
    assert staged.activation_bytes - alone.activation_bytes == 8 * 8192 * 3
    # Chunks keep more microbatches: (p - 1) / (p n) of all layers' worth.
    chunked = estimate(pipeline=4, chunks=2)
    assert chunked.activation_bytes - staged.activation_bytes == 8192 * 4096 * 41 * 32 * 3 / 8


def test_the_published_transcription():
    more = estimate(pipeline=8, literal=True).activation_bytes - estimate(pipeline=8).activation_bytes
    assert more == 8192 * 8 * 8 * (4096 - 1)


def test_the_rule_of_eighty_percent():
    found = estimate()
    assert found.total_bytes == found.static_bytes + found.activation_bytes
    assert found.fits(found.total_bytes / 0.79)
    assert not found.fits(found.total_bytes / 0.81)
    with pytest.raises(ValueError, match="memory_bytes = -1"):
        found.fits(-1)


def test_degrees_are_positive():
    with pytest.raises(ValueError, match="tensor = 0: at least one rank is needed"):
        Degrees(tensor=0)


def test_experts_by_hand():
    eight = Experts(count=8, per_token=2, ffn=14336)
    layer = 3 * 4096 * 14336
    # Seven more of them in each of 32 layers, and the activations of one more.
    assert estimate(experts=eight).static_bytes - estimate().static_bytes == 18 * 32 * 7 * layer
    more = estimate(experts=eight).activation_bytes - estimate().activation_bytes
    assert more == 8192 * 8 * 14336 * 32
    # Of 8 data-parallel ranks 4 share the experts, and 2 hold the same.
    shared = Experts(count=8, per_token=2, ffn=14336, ranks=4)
    parts = estimate(experts=shared, data=8).static_bytes - estimate(experts=eight, data=8).static_bytes
    assert parts == pytest.approx(32 * 8 * layer * ((6 + 12 / 2) / 4 - (6 + 12 / 8)))
    one = Experts(count=1, per_token=1, ffn=14336)
    assert estimate(experts=one).total_bytes == estimate().total_bytes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 8, "per_token": 9}, "per_token = 9: a token is sent to 1 to 8 experts"),
        ({"count": 8, "per_token": 2, "ranks": 3}, "ranks = 3: they must share 8 experts equally"),
    ],
)
def test_experts_that_do_not_go_together(given, message):
    with pytest.raises(ValueError, match=message):
        Experts(ffn=8, **given)
    with pytest.raises(ValueError, match="ranks = 4: they must divide the 2 data- and context-parallel ranks"):
        estimate(experts=Experts(count=8, per_token=1, ffn=8, ranks=4), data=2)
