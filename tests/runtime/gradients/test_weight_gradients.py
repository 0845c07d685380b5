import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_mist.errors import TraceError
from lightning_mist.plan.tensor_split import ParameterSplit
from lightning_mist.runtime.gradients.weight_gradients import WeightGradients
from lightning_mist.runtime.stage.stage_split import checkpoint_block
from lightning_mist.tensor_parallel import SplitContext, present, run_ranks, shard, whole


class Net(nn.Module):
    """Every kind of product whose weight's gradient can wait, and some other parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.linear = nn.Linear(6, 6)
        self.addmm = nn.Parameter(torch.randn(6, 6))
        self.addmm_bias = nn.Parameter(torch.randn(6))
        self.matmul = nn.Parameter(torch.randn(6, 5))
        self.norm = nn.LayerNorm(5)
        self.turned = nn.Parameter(torch.randn(5, 5))
        self.head = nn.Linear(5, 7, bias=False)

    def forward(self, tokens):
        x = F.relu(self.linear(self.embed(tokens)), inplace=True)
        x = torch.addmm(self.addmm_bias, x.view(-1, 6), self.addmm).view(x.shape)
        x = self.norm(x @ self.matmul) @ self.turned.t()
        return self.head(x)


WAITING = {"linear.weight", "addmm", "matmul", "head.weight"}


def gradients_of(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def plain_and_deferred(module, inputs, loss, *, autocast=False):
    """A module after a plain backward, its copy after a split one, and what waited in between."""
    other = copy.deepcopy(module)
    deferral = WeightGradients(dict(other.named_parameters()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = loss(module(inputs))
        with deferral.watching():
            split = loss(other(inputs))
    assert torch.equal(plain, split)
    plain.backward()
    with deferral.collecting(0):
        split.backward()
    waiting = deferral.names(0)
    assert all(p.grad is None for name, p in other.named_parameters() if name in waiting)
    deferral.run(0)
    assert deferral.names(0) == frozenset()
    return module, other, waiting


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_those_of_one_backward_and_weights_wait(dtype):
    torch.manual_seed(0)
    plain, split, waiting = plain_and_deferred(Net().to(dtype), torch.randint(7, (3, 4)), lambda y: y.square().mean())
    assert waiting == WAITING
    for (name, one), other in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert other.grad.dtype == dtype
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-6, atol=1e-6, msg=name)


def test_autocast_multiplies_in_its_type_and_accumulates_in_the_weight_s():
    torch.manual_seed(0)
    plain, split, waiting = plain_and_deferred(
        Net(), torch.randint(7, (3, 4)), lambda y: y.float().square().mean(), autocast=True
    )
    assert waiting == WAITING
    for (name, one), other in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert other.grad.dtype == torch.float32
        assert torch.equal(other.grad, one.grad), name


def test_values_without_gradient_and_single_vectors():
    torch.manual_seed(0)
    module = nn.Linear(3, 2, bias=False).double()
    inputs = torch.randn(3).double()
    plain, split, waiting = plain_and_deferred(module, inputs, lambda y: y.sum())
    assert waiting == {"weight"}
    torch.testing.assert_close(split.weight.grad, plain.weight.grad)


def test_frozen_weights_and_steps_without_gradients_are_left_alone():
    module = Net()
    module.linear.weight.requires_grad_(False)
    deferral = WeightGradients(dict(module.named_parameters()))
    with deferral.watching():
        with torch.no_grad():
            assert module(torch.randint(7, (2, 2))).grad_fn is None
        loss = module(torch.randint(7, (2, 2))).sum()
    with deferral.collecting(0):
        loss.backward()
    assert deferral.names(0) == WAITING - {"linear.weight"}
    deferral.run(0)
    assert module.linear.weight.grad is None


def test_weights_of_others_are_not_deferred():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    deferral = WeightGradients(dict(module.named_parameters()))
    with deferral.watching():
        loss = other(module(torch.randn(1, 2))).sum()
    with deferral.collecting(0):
        loss.backward()
    assert deferral.names(0) == {"weight"}
    assert other.weight.grad is not None


@pytest.mark.parametrize(
    ("value", "weight"),
    [
        (torch.randn(2, 3).to_sparse(), torch.randn(3, 2)),
        (torch.randn(2, 3, dtype=torch.complex64), torch.randn(3, 2, dtype=torch.complex64)),
        (torch.randn(4, 2, 3), torch.randn(4, 3, 2)),
    ],
    ids=["sparse", "complex", "batched"],
)
def test_other_products_stay_as_they_are(value, weight):
    expected, split = nn.Parameter(weight), nn.Parameter(weight.clone())
    deferral = WeightGradients({"w": split})
    torch.matmul(value, expected).abs().sum().backward()
    with deferral.watching():
        loss = torch.matmul(value, split).abs().sum()
    loss.backward()
    assert deferral.names(0) == frozenset()
    torch.testing.assert_close(split.grad, expected.grad)


def test_a_weight_used_twice_is_accumulated_once_with_its_hooks():
    torch.manual_seed(0)
    module = nn.Linear(4, 4).double()
    split = copy.deepcopy(module)
    seen = []
    split.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    deferral = WeightGradients(dict(split.named_parameters()))
    inputs = [torch.randn(2, 4).double() for _ in range(2)]
    for key, value in enumerate(inputs):
        module(module(value).tanh()).square().sum().backward()
        with deferral.watching():
            loss = split(split(value).tanh()).square().sum()
        with deferral.collecting(key):
            loss.backward()
    assert seen == []
    deferral.run(1)
    assert len(seen) == 1
    deferral.run(0)
    assert len(seen) == 2
    torch.testing.assert_close(split.weight.grad, module.weight.grad)
    torch.testing.assert_close(split.bias.grad, module.bias.grad)


@pytest.mark.parametrize("size", [2, 3])
def test_recomputed_blocks_wait_as_well(size):
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)], nn.Dropout(0.5)).double()
    split = copy.deepcopy(module)
    deferral = WeightGradients(dict(split.named_parameters()))
    inputs = torch.randn(2, 4).double()
    torch.manual_seed(1)
    module(inputs).square().sum().backward()
    torch.manual_seed(1)
    with deferral.watching():
        loss = checkpoint_block(split, (inputs,), {}, within=deferral.watching).square().sum()
    assert deferral.names(0) == frozenset()
    with deferral.collecting(0):
        loss.backward()
    assert len(deferral.names(0)) == size
    deferral.run(0)
    for one, other in zip(module.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


class Last(TorchFunctionMode):
    """Keeps what every product gave."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.found.append(output)
        return output


def test_modes_entered_later_see_what_carries_the_gradient():
    module = nn.Linear(2, 2)
    deferral = WeightGradients(dict(module.named_parameters()))
    with deferral.watching(), Last() as last, deferral.watching():
        module(torch.randn(1, 2))
    with deferral.collecting(0):
        last.found[0].sum().backward()
    assert deferral.names(0) == {"weight"}


def test_a_backward_of_the_step_s_own_is_refused():
    module = nn.Linear(2, 2)
    deferral = WeightGradients(dict(module.named_parameters()))
    with (
        deferral.watching(),
        pytest.raises(TraceError, match="weight got a gradient outside of the schedule's backward"),
    ):
        module(torch.randn(1, 2)).sum().backward()


def test_what_waits_can_be_dropped():
    module = nn.Linear(2, 2)
    deferral = WeightGradients(dict(module.named_parameters()))
    with deferral.watching():
        loss = module(torch.randn(1, 2)).sum()
    with deferral.collecting("key"):
        loss.backward()
    deferral.forget()
    deferral.run("key")
    assert module.weight.grad is None


@pytest.mark.parametrize("shared_dim", [0, 1])
@pytest.mark.parametrize("kind", ["linear", "addmm", "matmul"])
def test_parts_of_tensor_parallel_weights_wait_too(kind, shared_dim):
    torch.manual_seed(0)
    full, bias, value = torch.randn(4, 4).double(), torch.randn(4).double(), torch.randn(3, 4).double()
    split = ParameterSplit(name="w", dim=shared_dim, factors=((4, True),))

    def multiply(weight):
        if kind == "linear":
            return F.linear(value, weight, bias)
        return torch.addmm(bias, value, weight) if kind == "addmm" else value @ weight

    expected = full.clone().requires_grad_()
    multiply(expected).square().sum().backward()

    def rank(group):
        local = nn.Parameter(shard(full, split, group.rank, group.size))
        deferral = WeightGradients({"w": local})
        with deferral.watching():
            loss = whole(multiply(present(local, split, SplitContext(group)))).square().sum()
        with deferral.collecting(0):
            loss.backward()
        assert local.grad is None
        assert deferral.names(0) == {"w"}
        deferral.run(0)
        return local.grad

    for index, gradient in enumerate(run_ranks(2, rank)):
        torch.testing.assert_close(gradient, shard(expected.grad, split, index, 2))
