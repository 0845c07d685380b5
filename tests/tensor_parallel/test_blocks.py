"""Whole blocks of user code, split by hand, against themselves unsplit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mist.plan import ParameterSplit, SequenceSplit
from lightning_mist.tensor_parallel import SplitContext, enter_sequence, present, run_ranks, shard, unshard, whole
from tests import zoo

WIDTH, HEADS = 32, 4


def columns(name, *factors, dim=0):
    return [ParameterSplit(name=f"{name}.weight", dim=dim, factors=factors)]


def with_bias(splits):
    return [*splits, *(ParameterSplit(name=s.name.replace("weight", "bias"), dim=0, factors=s.factors) for s in splits)]


def gpt2_block(attention="sdpa"):
    qkv = with_bias(columns("attn.c_attn", (3, False), (WIDTH, True), dim=1))
    up = with_bias(columns("mlp.c_fc", (4 * WIDTH, True), dim=1))
    down = [*columns("attn.c_proj", (WIDTH, True)), *columns("mlp.c_proj", (4 * WIDTH, True))]
    return zoo.gpt2(1, attn_implementation=attention).model.transformer.h[0], [*qkv, *up, *down], ()


def llama_block():
    model = zoo.llama(1).model.model
    rotary = model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(6)[None])
    splits = [
        *columns("self_attn.q_proj", (WIDTH, True)),
        *columns("self_attn.k_proj", (WIDTH // 2, True)),
        *columns("self_attn.v_proj", (WIDTH // 2, True)),
        *columns("self_attn.o_proj", (WIDTH, True), dim=1),
        *columns("mlp.gate_proj", (64, True)),
        *columns("mlp.up_proj", (64, True)),
        *columns("mlp.down_proj", (64, True), dim=1),
    ]
    return model.layers[0], splits, {"position_embeddings": rotary}


def encoder_block():
    block = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    packed = ((3, False), (WIDTH, True))
    splits = [
        ParameterSplit(name="self_attn.in_proj_weight", dim=0, factors=packed),
        ParameterSplit(name="self_attn.in_proj_bias", dim=0, factors=packed),
        *columns("self_attn.out_proj", (WIDTH, True), dim=1),
        *with_bias(columns("linear1", (64, True))),
        *columns("linear2", (64, True), dim=1),
    ]
    return block, splits, ()


BLOCKS = {
    "gpt2": gpt2_block,
    "gpt2, eager": lambda: gpt2_block("eager"),
    "llama": llama_block,
    "encoder": encoder_block,
}


def run(block, hidden, extra, call=None):
    call = block if call is None else call
    output = call(hidden, **extra) if isinstance(extra, dict) else call(hidden)
    return output[0] if isinstance(output, tuple) else output


def differences(block, splits, extra, degree, *, sequence=False, recompute=False):
    """What a split block gives beyond the whole one: its largest deviations, and what it gathered."""
    hidden = torch.randn(3, 6, WIDTH, dtype=torch.float64)
    cotangent = torch.randn_like(hidden)
    by_name = {split.name: split for split in splits}

    def as_rank(group):
        context = SplitContext(group, sequence_parallel=sequence)
        mine = copy.deepcopy(block)
        entered = hidden.clone().requires_grad_()
        locals_ = {}
        for name, parameter in list(mine.named_parameters()):
            if name in by_name:
                locals_[name] = nn.Parameter(shard(parameter.detach(), by_name[name], group.rank, group.size))
                owner, _, attribute = name.rpartition(".")
                shown = present(locals_[name], by_name[name], context)
                mine.get_submodule(owner)._parameters[attribute] = shown
        value = entered
        if sequence:
            (value,), _ = enter_sequence((entered,), {}, SequenceSplit(position=0, leaf=0, dim=1), context)

        def call(*args, **kwargs):
            return checkpoint(mine, *args, use_reentrant=False, **kwargs) if recompute else mine(*args, **kwargs)

        output = whole(run(mine, value, extra, call))
        output.backward(cotangent)
        grads = {name: p.grad for name, p in mine.named_parameters() if name not in by_name}
        return output.detach(), entered.grad, grads, {n: p.grad for n, p in locals_.items()}, context.gathered

    entered = hidden.clone().requires_grad_()
    expected = run(block, entered, extra)
    expected.backward(cotangent)
    results = run_ranks(degree, as_rank)
    found = []
    for output, gradient, grads, _, _ in results:
        found += [output - expected.detach(), gradient - entered.grad]
        found += [grads[name] - p.grad for name, p in block.named_parameters() if name not in by_name]
    for name, split in by_name.items():
        found.append(unshard([parts[name] for _, _, _, parts, _ in results], split) - block.get_parameter(name).grad)
    return max(item.abs().max().item() for item in found), results[0][-1]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_split_block_is_the_block(name, sequence, recompute):
    torch.manual_seed(0)
    block, splits, extra = BLOCKS[name]()
    block.double().train()
    largest, gathered = differences(block, splits, extra, 2, sequence=sequence, recompute=recompute)
    assert largest < 1e-12
    assert not gathered


@pytest.mark.parametrize("name", ["gpt2", "encoder"])
def test_over_four_ranks(name):
    block, splits, extra = BLOCKS[name]()
    largest, gathered = differences(block.double(), splits, extra, 4)
    assert largest < 1e-12
    assert not gathered
