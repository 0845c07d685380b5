"""Whole models with their layers split by hand: loss and all gradients as of the unsplit ones."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mist.plan import ParameterSplit, SequenceSplit
from lightning_mist.tensor_parallel import SplitContext, enter_sequence
from tests import zoo
from tests.tensor_parallel.splitting import compare

COLUMNS = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "query", "key", "value", "intermediate.dense", ".q",
    ".k", ".v", ".wi", "linear1", "mlp.0",
)  # fmt: skip
ROWS = ("o_proj", "down_proj", "fc2", "output.dense", ".o", ".wo", "linear2", "out_proj", "mlp.2", "attn.c_proj")
FUSED = ("attn.c_attn", "in_proj_")


def splits_of(module: nn.Module, *, is_conv: bool = False) -> list[ParameterSplit]:
    """Splits of all layers by the names that these models give them."""
    found = []
    for name, parameter in module.named_parameters():
        layer = name.rpartition(".")[0]
        is_weight = parameter.dim() == 2
        if any(mark in name for mark in FUSED):
            dim = 1 if is_conv and is_weight else 0
            factors = ((3, False), (parameter.shape[dim] // 3, True))
        elif layer.endswith((*COLUMNS, "c_fc")) and layer.count("crossattention") == 0:
            dim = 1 if is_conv and is_weight else 0
            factors = ((parameter.shape[dim], True),)
        elif layer.endswith((*ROWS, "mlp.c_proj")) and is_weight:
            dim = 0 if is_conv else 1
            factors = ((parameter.shape[dim], True),)
        elif "relative_attention_bias" in name:
            dim, factors = 1, ((parameter.shape[1], True),)
        else:
            continue
        found.append(ParameterSplit(name=name, dim=dim, factors=factors))
    return found


def step(module: nn.Module, batch: Any) -> Any:
    return lambda module, context: module.training_step(batch, 0)


MODELS = {
    "nano": (lambda: zoo.Nano(2), zoo.pair_batch),
    "gpt2": (lambda: zoo.gpt2(2), zoo.token_batch),
    "gpt2-eager": (lambda: zoo.gpt2(2, attn_implementation="eager"), zoo.token_batch),
    "llama": (lambda: zoo.llama(2), zoo.token_batch),
    "llama-eager": (lambda: zoo.llama(2, attn_implementation="eager"), zoo.token_batch),
    "bert": (lambda: zoo.bert(2), zoo.token_batch),
    "vit": (lambda: zoo.vit(2), zoo.image_batch),
    "t5": (lambda: zoo.t5(2), zoo.make("t5")[1]),
    "encoder": (lambda: zoo.Encoder(2), zoo.token_batch),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_split_without_gathering(name: str):
    torch.manual_seed(0)
    build, make_batch = MODELS[name]
    module = build().double()
    batch = make_batch(4)
    splits = splits_of(module, is_conv=name.startswith("gpt2"))
    share = sum(p.numel() for n, p in module.named_parameters() if n in {s.name for s in splits})
    assert share > 0.5 * sum(p.numel() for n, p in module.named_parameters() if "embed" not in n and "lm_head" not in n)
    degrees = (2,) if name.startswith("llama") else (2, 4)
    for degree in degrees:
        compare(module, step(module, batch), splits, degree)


BLOCKS = {
    "nano": "transformer.h", "gpt2": "model.transformer.h", "llama": "model.model.layers",
    "bert": "model.bert.encoder.layer",
    "vit": "model.vit.layers", "t5": "model.decoder.block", "encoder": "encoder.layers",
}  # fmt: skip


def step_along_sequence(name: str, batch: Any, checkpointed: bool = False) -> Any:
    """The step with hidden states entering every block in parts."""

    def call(module: nn.Module, context: SplitContext | None) -> Any:
        blocks = module.get_submodule(BLOCKS[name.partition("-")[0]])
        for position, block in enumerate(blocks):
            forward = block.forward

            def enter(*args: Any, position: int = position, forward: Any = forward, **kwargs: Any) -> Any:
                if context is not None:
                    args, kwargs = enter_sequence(
                        args, kwargs, SequenceSplit(position=position, leaf=0, dim=1), context
                    )
                if checkpointed:
                    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
                return forward(*args, **kwargs)

            block.forward = enter
        try:
            return module.training_step(batch, 0)
        finally:
            for block in blocks:
                del block.forward

    return call


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_run_along_the_sequence(name: str, checkpointed: bool):
    torch.manual_seed(0)
    build, make_batch = MODELS[name]
    module = build().double()
    batch = make_batch(4)
    splits = splits_of(module, is_conv=name.startswith("gpt2"))
    for child in module.modules():
        if hasattr(getattr(child, "config", None), "use_cache"):
            child.config.use_cache = False  # running a block again would append to its cache again
    compare(module, step_along_sequence(name, batch, checkpointed), splits, 2, sequence_parallel=True)
