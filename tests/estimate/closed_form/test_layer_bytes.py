"""The closed form against traces of the package's own tensor parallelism, byte for byte."""

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import sympy
import torch

from lightning_mist.estimate.closed_form.layer_bytes import (
    CPU,
    CUDA,
    OperatorSet,
    Split,
    attention_kind,
    layer_form,
)
from lightning_mist.estimate.closed_form.network_sizes import TransformerDims, dims_of
from lightning_mist.estimate.closed_form.transformer_estimate import shape_dims
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from tests.cost.transformers import GPT, LENGTH, LLAMA, Transformer, count, mapped

MEGATRON = replace(CUDA, name="Megatron-LM", gathers="repeated")
"""What the paper assumes: CUDA's operators, and inputs that are gathered again in backward."""

DROPOUT = replace(GPT, dropout=0.1, attention_dropout=0.1)
DEGREES = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16)


@lru_cache(maxsize=4)
def network(dims, degrees=DEGREES[1:]):
    module = Transformer(dims)
    return module, mapped(module, degrees)


def traced(dims, dtype, degrees=DEGREES[1:], **how):
    module, module_map = network(dims, tuple(degrees))
    return count(module.to(dtype), module_map, **how).saved[1]


def check(dims, dtype, device, *, recomputed):
    operators = {"cpu": CPU, "cuda": CUDA}[device]
    for degree in DEGREES:
        for sequence in (False, True) if degree > 1 else (False,):
            split = Split(degree=degree, sequence_parallel=sequence)
            form = layer_form(dims, operators, itemsize=dtype.itemsize, split=split, recomputed=recomputed)
            how = {"degree": degree, "sequence": sequence, "recompute": recomputed, "device": device}
            assert form.at(2, LENGTH) == traced(dims, dtype, rows=2, **how), how


@pytest.mark.sample
@pytest.mark.combinations
@pytest.mark.parametrize("dims", [LLAMA, GPT, DROPOUT], ids=["llama", "gpt", "dropout"])
@pytest.mark.parametrize(
    ("dtype", "device", "recomputed"),
    [
        (torch.bfloat16, "cuda", False),
        (torch.bfloat16, "cuda", True),
        (torch.float32, "cuda", False),
        (torch.bfloat16, "cpu", False),
        (torch.float32, "cpu", False),
    ],
    ids=["cuda-bf16", "cuda-bf16-recomputed", "cuda-fp32", "cpu-bf16", "cpu-fp32"],
)
def test_layers_keep_what_the_form_says(dims, dtype, device, recomputed):
    check(dims, dtype, device, recomputed=recomputed)


@pytest.mark.combinations
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dims", [LLAMA, DROPOUT], ids=["llama", "dropout"])
def test_mixed_precision(dims, device):
    # As under Lightning, which keeps no cast weights from one operator to the next.
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    for degree, sequence in ((1, False), (2, False), (4, True)):
        split = Split(degree=degree, sequence_parallel=sequence)
        form = layer_form(dims, {"cpu": CPU, "cuda": CUDA}[device], mixed=True, split=split)
        how = {"degree": degree, "sequence": sequence, "device": device, "context": autocast}
        assert form.at(2, LENGTH) == traced(dims, torch.float32, rows=2, **how), how


@pytest.mark.combinations
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dims", [LLAMA, DROPOUT], ids=["llama", "dropout"])
def test_other_sizes(dims, device):
    form = layer_form(dims, {"cpu": CPU, "cuda": CUDA}[device])
    for rows, length in ((1, 64), (5, 48)):
        assert form.at(rows, length) == traced(dims, torch.bfloat16, rows=rows, length=length, device=device)


@pytest.mark.sample
@pytest.mark.parametrize(
    "changes",
    [
        {"fused_query_key_value": True},
        {"repeats_key_value": True},
        {"fused_query_key_value": True, "repeats_key_value": True},
        {"head_width": 16},
        {"key_value_heads": 16, "dropout": 0.1},
        {"feed_forward": "gelu", "norm": "layer"},
        {"query_key_value_bias": True},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_layers(changes, device):
    dims = replace(LLAMA, **changes)
    for dtype in DTYPES:
        form = layer_form(dims, {"cpu": CPU, "cuda": CUDA}[device], itemsize=dtype.itemsize)
        assert form.at(2, LENGTH) == traced(dims, dtype, rows=2, device=device, degrees=())


LLAMA_3_8B = TransformerDims(hidden=4096, ffn=14336, layers=32, heads=32, key_value_heads=8, vocabulary=128256)
LLAMA_2_7B = TransformerDims(hidden=4096, ffn=11008, layers=32, heads=32, vocabulary=32000)
LLAMA_3_70B = TransformerDims(hidden=8192, ffn=28672, layers=80, heads=64, key_value_heads=8, vocabulary=128256)


@pytest.mark.parametrize(
    ("dims", "published"), [(LLAMA_3_8B, 41.0), (LLAMA_2_7B, 37.5), (LLAMA_3_70B, 40.5)], ids=["8b", "7b", "70b"]
)
def test_the_paper_s_formula_and_what_it_leaves_out(dims, published):
    h, f, a, k = dims.hidden, dims.ffn, dims.heads, dims.groups
    assert 12 + 4 * k / a + 8 * f / h == published
    unit = MICROBATCH * SEQUENCE * h
    # Two norms' deviations and one log-sum-exp per head, all in 32 bits, and the state of dropout.
    small = MICROBATCH * SEQUENCE * (2 * 4 + 4 * a) + 24
    assert sympy.expand(layer_form(dims, CUDA).bytes - sympy.nsimplify(published) * unit - small) == 0
    decomposed = layer_form(dims, replace(CUDA, rms_norm="decomposed")).bytes
    assert sympy.expand(decomposed - layer_form(dims, CUDA).bytes - 12 * unit) == 0


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_tensor_parallelism_by_the_formulas(degree):
    h, per_row = LLAMA_3_8B.hidden, MICROBATCH * SEQUENCE * LLAMA_3_8B.hidden
    small = 4 * LLAMA_3_8B.heads  # of queries, which ranks share
    whole = 41

    def units(operators, sequence):
        split = Split(degree=degree, sequence_parallel=sequence)
        norms = 8 / degree if sequence else 8
        found = layer_form(LLAMA_3_8B, operators, split=split).bytes - 24
        return float((found - MICROBATCH * SEQUENCE * (norms + small / degree)) / per_row)

    assert units(MEGATRON, True) == pytest.approx(whole / degree)
    assert units(CUDA, True) == pytest.approx(whole / degree + 4 * (1 - 1 / degree))
    assert units(CUDA, False) == pytest.approx(8 + (whole - 8) / degree)
    assert units(MEGATRON, False) == units(CUDA, False)
    assert h == 4096


def test_fused_swiglu_and_context_parallelism():
    unit = MICROBATCH * SEQUENCE * LLAMA_3_8B.ffn
    plain, fused = (layer_form(LLAMA_3_8B, replace(CUDA, swiglu=how)).bytes for how in ("plain", "fused"))
    assert sympy.expand(plain - fused - 2 * unit) == 0
    shared = layer_form(LLAMA_3_8B, split=Split(context=4))
    assert shared.at(1, 4096) == layer_form(LLAMA_3_8B).at(1, 1024)


def test_a_form_says_which_tensor_has_how_many_bytes():
    form = layer_form(LLAMA, split=Split(degree=2))
    named = {tensor.name: int(form.of(tensor).subs({MICROBATCH: 1, SEQUENCE: 2})) for tensor in form.kept}
    assert named["attention input"] == 2 * 128 * 2
    assert named["gate"] == 2 * 352 * 2 // 2
    assert named["attention: log-sum-exp"] == 2 * 16 * 4 // 2
    assert sum(named.values()) + form.extra_bytes == form.at(1, 2)


def test_which_attention_runs():
    grouped, equal = LLAMA, replace(LLAMA, key_value_heads=None)
    assert attention_kind(grouped, CUDA, 2) == "flash"
    assert attention_kind(equal, CUDA, 4) == "efficient"
    assert attention_kind(replace(grouped, repeats_key_value=True), CUDA, 4) == "efficient"
    assert attention_kind(grouped, CUDA, 4) == attention_kind(equal, CUDA, 8) == "math"
    assert attention_kind(equal, CPU, 4) == "flash"
    assert attention_kind(replace(equal, attention_dropout=0.1), CPU, 4) == "math"


def test_what_ranks_cannot_share_equally():
    with pytest.raises(ValueError, match="1 rows of 3 tokens over tensor-parallel degree 7"):
        layer_form(LLAMA, OperatorSet(name="any"), split=Split(degree=7)).at(1, 3)


SHAPES = {
    "gpt": LanguageModelShape(hidden=128, ffn=512, layers=2, heads=4, vocabulary=96),
    "llama": LanguageModelShape(
        hidden=128, ffn=352, layers=2, heads=4, vocabulary=96, feed_forward="swiglu", norm="rmsnorm",
        rotary_fraction=0.25,
    ),
    "grouped": LanguageModelShape(
        hidden=128, ffn=352, layers=2, heads=4, key_value_heads=2, vocabulary=96, feed_forward="swiglu",
        norm="rmsnorm", rotary_fraction=1.0,
    ),
}  # fmt: skip


@pytest.mark.combinations
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_models_known_by_name(shape, device):
    module, dims = LanguageModel(shape, LENGTH), shape_dims(shape, LENGTH)
    assert dims.parameters == sum(parameter.numel() for parameter in module.parameters())
    module_map = mapped(module)
    for dtype in DTYPES:
        form = layer_form(dims, {"cpu": CPU, "cuda": CUDA}[device], itemsize=dtype.itemsize)
        found = count(module.to(dtype), module_map, rows=2, device=device).saved[1]
        assert form.at(2, LENGTH) == found, dtype


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hugging_face_s_modules(name):
    transformers = pytest.importorskip("transformers")
    configuration, make = {
        "llama": (
            transformers.LlamaConfig(
                hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=97,
            ),
            transformers.LlamaForCausalLM,
        ),
        "gpt2": (
            transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=97, n_positions=64),
            transformers.GPT2LMHeadModel,
        ),
    }[name]  # fmt: skip
    module, dims = Causal(make(configuration)), dims_of(configuration)
    for dtype in DTYPES:
        module_map = mapped(module.to(dtype))
        for rows in (2, 3):
            saved = count(module, module_map, rows=rows, device="cuda").saved[1]
            assert layer_form(dims, CUDA, itemsize=dtype.itemsize).at(rows, LENGTH) == saved, dtype


class Causal(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch[0], labels=batch[1]).loss
