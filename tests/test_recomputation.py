import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_mist.errors import TraceError
from lightning_mist.recomputation import is_kept, neutral_checkpointing, selective_contexts, watched_checkpoints


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(16, 48), nn.Linear(16, 16), dropout

    def forward(self, x):
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.inner(x).chunk(3, dim=-1)]
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True)
        return functional.dropout(x + self.outer(mixed.transpose(1, 2).flatten(2)), 0.3)


class InPlace(nn.Module):
    """Changes what products return in place, directly and through a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = functional.silu(self.first(x).add_(1.0), inplace=True)
        z = self.second(y)
        z.flatten().mul_(0.5)
        return {"y": z * y, "name": "block"}


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.softmax(x @ x.transpose(-1, -2), dim=-1) @ x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


class OwnAttention(Attention):
    def forward(self, x):
        return self.outer(Own.apply(functional.gelu(self.inner(x))[..., :16]))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)

    def forward(self, x):
        return functional.relu(self.norm(self.conv(x)))


def gradients(block, contexts, dtype=torch.float64, autocast=False):
    block = copy.deepcopy(block).to(dtype)
    torch.manual_seed(1)
    x = torch.randn(3, 8, 16, dtype=dtype, requires_grad=True)
    kept = {} if contexts is None else {"context_fn": contexts}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        y = block(x) if contexts is False else checkpoint(block, x, use_reentrant=False, **kept)
    loss = (y["y"] if isinstance(y, dict) else y).square().sum()
    loss.backward()
    return [loss, x.grad, *(parameter.grad for parameter in block.parameters()), torch.rand(2)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [Attention, partial(Attention, 0.5), InPlace, OwnAttention, Convolutions])
def test_gradients_and_random_numbers_are_those_of_a_plain_run(make, dtype, autocast):
    block = make()
    found, expected = gradients(block, selective_contexts, dtype, autocast), gradients(block, False, dtype, autocast)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def counted(block, contexts):
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        gradients(block, contexts)
    return counter.get_total_flops()


@pytest.mark.parametrize("make", [Attention, InPlace, Convolutions])
def test_products_run_no_second_time(make):
    block = make()
    assert counted(block, selective_contexts) == counted(block, False) < counted(block, None)


def test_the_same_is_kept_as_under_torchs_own_contexts():
    kept = []

    def policy(context, operator, *args, **kwargs):
        kept.append(str(operator) if is_kept(operator, args, kwargs) else "")
        return is_kept(operator, args, kwargs)

    block = Attention()
    theirs = gradients(block, partial(create_selective_checkpoint_contexts, policy))
    assert all(map(torch.equal, theirs, gradients(block, selective_contexts)))
    assert {"aten.addmm.default"} < set(kept) - {""}


def test_a_forward_that_multiplies_otherwise_the_second_time_is_refused():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = nn.Linear(16, 16), None

        def forward(self, x):
            if self.table is None:
                self.table = torch.ones(8, 4, dtype=x.dtype) @ torch.ones(4, 16, dtype=x.dtype)
            return torch.tanh(self.layer(x + self.table)).sin()

    with pytest.raises(TraceError, match="repeated forward"):
        gradients(Forgetful(), selective_contexts)


def test_batch_statistics_are_updated_as_under_any_checkpoint():
    block = Convolutions().double()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts).sum().backward()
    assert block.norm.num_batches_tracked == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_users_recompute_is_watched_where_it_runs_once(reentrant):
    seen, x = [], torch.ones(3, requires_grad=True)

    @contextmanager
    def watch():
        seen.append("before")
        yield
        seen.append("after")

    with neutral_checkpointing(), watched_checkpoints(watch):
        checkpoint(lambda item: seen.append("inside") or item * 2, x, use_reentrant=reentrant).sum().backward()
    assert seen == ["before", "inside", "after"]
    assert x.grad.tolist() == [2, 2, 2]
