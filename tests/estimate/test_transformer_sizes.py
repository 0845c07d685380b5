from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_mist.estimate.transformer_sizes import FAMILIES, TransformerDims, dims_of, module_dims, shape_dims
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow
from tests import zoo

SHAPE = LanguageModelShape(
    hidden=64, ffn=128, layers=2, heads=4, vocabulary=96, feed_forward="swiglu", norm="rmsnorm", rotary_fraction=1.0
)
LENGTH = 16


def sizes(hidden, inner, layers, heads, vocabulary, groups=None, **more):
    found = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    found |= {"num_attention_heads": heads, "vocab_size": vocabulary, "tie_word_embeddings": False}
    return {**found, "num_key_value_heads": groups or heads, **more}


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

PUBLISHED = {
    "gpt2": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}),
    "pythia-6.9b": ("gpt_neox", sizes(4096, 16384, 32, 32, 50432)),
    "Llama-2-7b": ("llama", sizes(4096, 11008, 32, 32, 32000)),
    "Meta-Llama-3-70B": ("llama", sizes(8192, 28672, 80, 64, 128256, 8)),
    "Mistral-7B-v0.1": ("mistral", sizes(4096, 14336, 32, 32, 32000, 8)),
    "Phi-3-mini-4k": ("phi3", sizes(3072, 8192, 32, 32, 32064)),
    "gemma-7b": ("gemma", {**sizes(3072, 24576, 28, 16, 256000, head_dim=256), "tie_word_embeddings": None}),
    "Qwen2.5-7B": ("qwen2", sizes(3584, 18944, 28, 28, 152064, 4)),
    "Qwen3-8B": ("qwen3", sizes(4096, 12288, 36, 32, 151936, 8, head_dim=128)),
    "Mixtral-8x7B-v0.1": (
        "mixtral",
        sizes(4096, 14336, 32, 32, 32000, 8, num_local_experts=8, num_experts_per_tok=2),
    ),
    "Mixtral-8x22B-v0.3": (
        "mixtral",
        sizes(6144, 16384, 56, 48, 32768, 8, num_local_experts=8, num_experts_per_tok=2),
    ),
    "OLMoE-1B-7B": ("olmoe", sizes(2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8)),
    "Phi-3.5-MoE": (
        "phimoe",
        sizes(
            4096, 6400, 32, 32, 32064, 8, num_local_experts=16, num_experts_per_tok=2, attention_bias=True,
            lm_head_bias=True,
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        sizes(
            2048, 5632, 24, 16, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        sizes(
            2048, 6144, 48, 32, 151936, 4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        sizes(
            2048, 10944, 27, 16, 102400, q_lora_rank=None, n_routed_experts=64, n_shared_experts=2,
            num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, **_LATENT,
        ),
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        sizes(
            7168, 18432, 61, 128, 129280, q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1,
            num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, **_LATENT,
        ),
    ),
    "GLM-4.5-Air": (
        "glm4_moe",
        sizes(
            4096, 10944, 46, 96, 151552, 8, head_dim=128, n_routed_experts=128, n_shared_experts=1,
            num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1, attention_bias=True,
            use_qk_norm=False,
        ),
    ),
}  # fmt: skip
"""Published configurations: what of them says how many parameters there are."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_module_that_transformers_makes(name):
    transformers = pytest.importorskip("transformers")
    family, stated = PUBLISHED[name]
    config = transformers.AutoConfig.for_model(
        family, **{k: v for k, v in stated.items() if (k, v) != ("tie_word_embeddings", None)}
    )
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert dims_of({"model_type": family, **stated}).parameters == count
    assert dims_of(config).parameters == count


def test_every_family_has_a_published_file():
    assert {family for family, _ in PUBLISHED.values()} == set(FAMILIES)
    assert (
        sum(dims_of({"model_type": family, **stated}).experts is not None for family, stated in PUBLISHED.values()) >= 6
    )


def test_layers_without_experts_are_where_a_file_says():
    family, stated = PUBLISHED["DeepSeek-V3"]
    dims = dims_of({"model_type": family, **stated})
    assert [dims.is_sparse(index) for index in (0, 2, 3, 60)] == [False, False, True, True]
    family, stated = PUBLISHED["Qwen3-30B-A3B"]
    dims = dims_of({"model_type": family, **stated, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [dims.is_sparse(index) for index in range(6)] == [False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "jamba"},
            "model_type 'jamba': a closed form counts the .* of gpt2, .*; trace it instead",
        ),
        ({"num_local_experts": 8}, "without model_type, with num_local_experts: only of known families"),
        ({"kv_lora_rank": 512}, "without model_type, with kv_lora_rank"),
        ({"vocab_size": None}, "without vocab_size: a closed form needs"),
        ({"intermediate_size": [1, 2]}, "intermediate_size = .*: a closed form needs one whole number"),
        ({"num_attention_heads": 3}, "heads = 3 with hidden = 64: they must divide it"),
        ({"num_key_value_heads": 3}, "key_value_heads = 3: it must divide heads = 4"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "3 experts for each token"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dims_of({**sizes(64, 128, 2, 4, 96), "rms_norm_eps": 1e-6, **changes})


def test_files_without_a_family_are_llamas_or_gpts():
    llama = dims_of({**sizes(64, 128, 2, 4, 96), "rms_norm_eps": 1e-6})
    assert (llama.norm, llama.feed_forward, llama.output_bias, llama.positions) == ("rms", "swiglu", False, 0)
    gpt = dims_of(SimpleNamespace(**sizes(64, 128, 2, 4, 96), max_position_embeddings=32, resid_pdrop=0.1))
    assert (gpt.norm, gpt.feed_forward, gpt.output_bias, gpt.positions) == ("layer", "gelu", True, 32)
    assert gpt.dropout == 0.1


def test_sizes_are_read_from_modules():
    assert module_dims(torch.nn.Linear(2, 2), LENGTH) is None
    parallel = replace(SHAPE, parallel=True)
    assert module_dims(hollow(lambda: LanguageModel(parallel, LENGTH)), LENGTH) is None
    dims = module_dims(zoo.make("llama")[0], 12)
    assert (dims.layers, dims.hidden, dims.feed_forward) == (4, 32, "swiglu")


def test_sizes_of_models_known_by_name():
    module = LanguageModel(SHAPE, LENGTH)
    dims = module_dims(module, LENGTH)
    assert dims == shape_dims(SHAPE, LENGTH)
    assert dims.parameters == sum(parameter.numel() for parameter in module.parameters())
    with pytest.raises(ValueError, match="share a norm: no closed form is about that"):
        shape_dims(replace(SHAPE, parallel=True), LENGTH)


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="ffn = 0: a transformer needs at least 1"):
        TransformerDims(hidden=8, ffn=0, layers=1, heads=1, vocabulary=8)
