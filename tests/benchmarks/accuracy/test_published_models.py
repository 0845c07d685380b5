"""The functions that stand for models of others keep what the library's own code keeps, to the byte."""

import dataclasses

import pytest
import torch

from benchmarks.accuracy.published_device import SimulatedDevice
from benchmarks.accuracy.published_kernels import flash_attention
from benchmarks.accuracy.published_models import Arithmetic, LlamaLike, Shape
from benchmarks.accuracy.published_parallel import ParallelDecoder
from benchmarks.accuracy.published_training import Trainer, Training

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8}
ROWS, LENGTH = 4, 128


def of_library(monkeypatch, cls, config, options):
    """Bytes that a forward leaves, and the peak of forward and backward, of the library's code."""
    from transformers import AttentionInterface

    def attention(module, query, key, value, mask=None, **options):
        return flash_attention(*(each.transpose(1, 2) for each in (query, key, value))), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "simulated", attention)
    config = config(
        **SIZES, **options, vocab_size=1000, bos_token_id=0, eos_token_id=0, attn_implementation="simulated"
    )
    with torch.device("meta"):
        model = cls(config).to(torch.bfloat16)
    device = SimulatedDevice()
    with device:
        tokens = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        kept = device.allocator.requested
        loss.backward()
    return kept, device.peak_allocated


def of_ours(model):
    device = SimulatedDevice()
    trainer = Trainer(device, model, Training(batch=ROWS, length=LENGTH))  # weights take no memory, as above
    with device:
        tokens = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
        loss = trainer.forward(tokens)
        kept = device.allocator.requested
        loss.backward()
    return kept, device.peak_allocated


def shape(kv_heads):
    return Shape(hidden=512, ffn=1536, layers=3, heads=8, kv_heads=kv_heads, vocabulary=1000, head=64, is_tied=False)


def llama(kv_heads=8, **changes):
    arithmetic = Arithmetic(dtype=torch.bfloat16)
    return LlamaLike(shape=shape(kv_heads), arithmetic=arithmetic, copies_shifted=False, **changes)


GEMMA = llama(is_gemma=True)
NEOX = ParallelDecoder(
    shape=shape(8),
    arithmetic=Arithmetic(dtype=torch.bfloat16),
    has_two_norms=True,
    has_bias=True,
    rotary=0.25,
    casts_logits=True,
    copies_shifted=False,
)
GROUPED = {"num_key_value_heads": 2}
TIED = {"num_key_value_heads": 1, "head_dim": 64, "pad_token_id": 0}


@pytest.mark.skipif(not hasattr(transformers, "AttentionInterface"), reason="attention cannot be named before 4.48")
@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("Llama", llama(), {}),
        ("Mistral", llama(2), GROUPED),
        ("Qwen2", llama(2, has_qkv_bias=True), {**GROUPED, "tie_word_embeddings": False}),
        ("Granite", llama(2), GROUPED),
        ("Gemma", dataclasses.replace(GEMMA, shape=dataclasses.replace(shape(1), is_tied=True)), TIED),
        ("GPTNeoX", NEOX, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_of_transformers(monkeypatch, name, model, options):
    cls, config = (getattr(transformers, f"{name}{what}") for what in ("ForCausalLM", "Config"))
    assert of_ours(model) == of_library(monkeypatch, cls, config, options)
