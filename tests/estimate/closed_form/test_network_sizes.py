from types import SimpleNamespace

import pytest

from lightning_mist.estimate.closed_form.network_sizes import TransformerDims, dims_of
from tests.cost.transformers import GPT, LLAMA, Transformer

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
GPT2 = {
    "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024, "n_inner": None,
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_known_networks():
    llama = dims_of(LLAMA_8B)
    assert llama.parameters == 8_030_261_248  # the model card's 8.03 billion
    assert (llama.norm, llama.feed_forward, llama.rotary, llama.groups) == ("rms", "swiglu", True, 8)
    gpt = dims_of(SimpleNamespace(**GPT2))
    assert gpt.parameters == 124_439_808  # "124M"
    assert (gpt.dropout, gpt.attention_dropout, gpt.positions, gpt.ffn) == (0.1, 0.1, 1024, 3072)


def test_configurations_of_transformers():
    transformers = pytest.importorskip("transformers")
    for configuration, model in (
        (transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                                  num_key_value_heads=2, vocab_size=97), transformers.LlamaForCausalLM),
        (transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=97),
         transformers.GPT2LMHeadModel),
        (transformers.MistralConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                                    num_key_value_heads=2, vocab_size=97), transformers.MistralForCausalLM),
    ):  # fmt: skip
        assert dims_of(configuration).parameters == sum(p.numel() for p in model(configuration).parameters())


@pytest.mark.parametrize("dims", [LLAMA, GPT], ids=["llama", "gpt"])
def test_parameters_of_modules(dims):
    module = Transformer(dims)
    assert dims.parameters == sum(p.numel() for p in module.parameters())
    assert dims.layer_parameters() == sum(p.numel() for p in module.layers[0].parameters())


def test_parameters_of_tensor_parallel_ranks():
    # Norms, and the biases that are added to sums over ranks, are whole.
    whole = 2 * 2 * 128 + 2 * 128
    assert GPT.layer_parameters(4) == (GPT.layer_parameters() - whole) // 4 + whole
    assert LLAMA.layer_parameters(2) == (LLAMA.layer_parameters() - 2 * 128) // 2 + 2 * 128


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="without num_attention_heads, vocab_size: a closed form needs them"):
        dims_of({"hidden_size": 64, "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers = 0: a transformer needs at least 1"),
        ({"heads": 7}, "heads = 7 with hidden = 64"),
        ({"key_value_heads": 3}, "key_value_heads = 3: it must divide heads = 4"),
    ],
)
def test_sizes_that_do_not_go_together(changes, message):
    sizes = {"hidden": 64, "ffn": 128, "layers": 2, "heads": 4, "vocabulary": 100}
    with pytest.raises(ValueError, match=message):
        TransformerDims(**{**sizes, **changes})
