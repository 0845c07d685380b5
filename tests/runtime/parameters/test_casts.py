"""Weights are cast once per batch under autocast, with the gradients of casting them at each use."""

from collections import Counter
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.model.split.splits import derive_splits
from lightning_mist.runtime.parameters import casts as casts_module
from lightning_mist.runtime.parameters.casts import (
    CastKeeper,
    can_keep_casts,
    follow,
    keeps_casts,
    kept_casts,
    no_kept_casts,
)
from lightning_mist.tensor_parallel import SplitTensor
from tests import zoo
from tests.integration.parity import make_plan, map_of, run_plan
from tests.tiers import tiered

ROWS, PARTS = 4, 4

PLANS = {
    "accumulation": {"layers": [4], "parts": PARTS},
    "1f1b": {"layers": [2, 2], "parts": PARTS},
    "gpipe": {"layers": [2, 2], "parts": PARTS, "schedule": "gpipe"},
    "zero bubble": {"layers": [2, 2], "parts": PARTS, "schedule": "zb-h1"},
    "chunks": {"layers": [1, 1, 1, 1], "parts": PARTS, "schedule": "interleaved-1f1b", "chunks": 2},
    "states sharded": {"layers": [4], "degrees": [2], "parts": PARTS, "zero": 1},
    "tensor parallel": {"layers": [4], "tensor": 2, "parts": PARTS},
}


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Casts(TorchDispatchMode):
    """Counts casts of weights by where they are."""

    def __init__(self):
        super().__init__()
        self.of, self.weights = Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default and not isinstance(args[0], FakeTensor)
        # Where parts of a weight were there may be activations now.
        if is_cast and args[0].grad_fn is None and address(args[0]) in self.weights:
            self.of[address(args[0])] += 1
        return func(*args, **(kwargs or {}))


class Mixed(nn.Module):
    """A module under Lightning's mixed precision, whose forwards are counted."""

    casts: Casts

    def __init__(self, model):
        super().__init__()
        self.model, self.plugin = model, MixedPrecision("bf16-mixed", "cpu")

    def training_step(self, batch, batch_idx):
        held = [p.local if isinstance(p, SplitTensor) else p for p in self.model.parameters()]
        self.casts.weights |= {address(p) for p in held if not isinstance(p, FakeTensor)}
        with self.plugin.train_step_context(), self.casts:
            return self.model.training_step(batch, batch_idx)


@pytest.fixture
def at_once(monkeypatch):
    """As if a batch had shown that no weight is used twice."""
    monkeypatch.setattr(CastKeeper, "first", 0)


def trained(how):
    """How often each parameter was cast in a batch, and what came out."""
    torch.manual_seed(0)
    model, make_batch = zoo.make("llama")
    module, plan, Mixed.casts = Mixed(model), make_plan(rows=ROWS, **how), Casts()
    batches = [make_batch(ROWS) for _ in range(plan.world_size)]
    found = map_of(module, batches[0])
    if "tensor" in how:
        found = derive_splits(module, lambda batch: module.training_step(batch, 0), batches[0], found, (how["tensor"],))
    Mixed.casts = Casts()
    outcome = run_plan(module, found, plan, batches, seed=5)
    return list(Mixed.casts.of.values()), outcome


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", tiered(list(PLANS), ["1f1b", "zero bubble"]))
def test_weights_are_cast_once_per_batch(how):
    kept, outcome = trained(PLANS[how])
    with mock.patch.object(casts_module, "can_keep_casts", return_value=False):
        each, expected = trained(PLANS[how])
    assert set(kept) == {1}
    uses = make_plan(rows=ROWS, **PLANS[how]).num_microbatches
    assert set(each) == {uses}
    assert len(kept) == len(each) > 4
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(outcome.losses, expected.losses, strict=True))
    for mine, wanted in zip(outcome.gradients, expected.gradients, strict=True):
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name], wanted[name]) for name in mine if wanted[name] is not None)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "how",
    tiered(
        [
            {"layers": [4], "parts": 1},
            {"layers": [4], "degrees": [2], "parts": 2, "zero": 2},
            {"layers": [4], "degrees": [2], "parts": 2, "zero": 3},
            {"layers": [4], "parts": 2, "checkpointed": 4},
        ],
        [{"layers": [4], "parts": 2, "checkpointed": 4}],
    ),
)
def test_casts_stay_nowhere_that_their_memory_was_saved(how):
    """Nor where a batch has one part, whose weights are cast once anyway."""
    plan = make_plan(rows=ROWS, **how)
    counts, _ = trained(how)
    # Under ZeRO-3 weights of several layers have the same address, one after the other.
    assert max(counts) >= plan.num_microbatches


def linear(x, weight, dtype=torch.bfloat16, **options):
    with torch.autocast("cpu", dtype, **options):
        return nn.functional.linear(x, weight)


class TestKeptCasts:
    def test_they_end_with_it(self):
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
        with kept_casts(), Casts() as casts:
            casts.weights.add(address(weight))
            first = linear(x, weight, cache_enabled=False)
            with torch.no_grad():
                weight.zero_()
            assert torch.equal(linear(x, weight, cache_enabled=False), first)
        with casts:
            assert not linear(x, weight).any()
        assert casts.of[address(weight)] == 2

    def test_another_type_is_cast_anew(self):
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
        with kept_casts():
            assert linear(x, weight).dtype is torch.bfloat16
            assert linear(x, weight, torch.float16).dtype is torch.float16
            assert linear(x, weight).dtype is torch.bfloat16

    def test_recomputed_layers_keep_none(self):
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
        with kept_casts(), Casts() as casts, torch.autocast("cpu", torch.bfloat16):
            casts.weights.add(address(weight))
            for _ in range(2):
                with no_kept_casts():
                    nn.functional.linear(x, weight)
                    linear(x, weight)
                nn.functional.linear(x, weight)
        assert casts.of[address(weight)] == 2 * 2 + 1

    def test_what_was_cast_without_a_graph_has_one_where_it_is_needed(self):
        assert can_keep_casts()
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
        with kept_casts():
            with torch.no_grad():
                linear(x, weight)
            linear(x, weight).sum().backward()
        assert weight.grad is not None

    @pytest.mark.parametrize("hastens", [True, False])
    def test_gradients_do_not_wait_for_the_end_of_backward(self, hastens):
        """They would, in all microbatches but the one that has cast."""
        x, seen = torch.ones(1, 2, requires_grad=True), []
        weights = [nn.Parameter(torch.eye(2)) for _ in range(2)]
        x.register_hook(lambda _: seen.append("input"))
        for number, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(lambda _, number=number: seen.append(number))
        with kept_casts():
            assert not keeps_casts()
            for microbatch in range(2):
                value = linear(linear(x * 1.0, weights[0]), weights[1])
                assert keeps_casts()
                if hastens and microbatch == 0:
                    assert follow([value, 1.0, torch.ones(1)]) == 1
                seen.clear()
                value.sum().backward()
        assert seen == ([1, 0, "input"] if hastens else ["input", 1, 0])

    def test_a_context_is_as_it_was_afterwards(self):
        context = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with kept_casts(), context:
            assert torch.is_autocast_cache_enabled()
        with context:
            assert not torch.is_autocast_cache_enabled()


class Shared(nn.Module):
    """Uses one weight as often as it is told to: gradients of many casts are added up in 32 bits."""

    def __init__(self, uses):
        super().__init__()
        self.shared, self.uses = nn.Linear(8, 8, bias=False), uses

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return sum(self.shared(batch * (1 + number)).float().square().mean() for number in range(self.uses))


def in_parts(module, keeper, rows):
    """Gradient of a batch of four parts of one row."""
    module.zero_grad()
    with keeper.batch():
        for number in range(4):
            loss = module.training_step(rows[number : number + 1], 0)
            keeper.look(0, {"loss": loss})
            loss.backward()
    return module.shared.weight.grad.clone()


class TestCastKeeper:
    @pytest.mark.parametrize("uses", [1, 2, 40])
    def test_gradients_are_those_of_a_cast_for_each_use(self, uses):
        module, rows = Shared(uses), torch.randn(4, 8)
        wanted = in_parts(module, CastKeeper(may_keep=False), rows)
        keeper, casts, weight = CastKeeper(may_keep=True), Casts(), address(module.shared.weight)
        casts.weights.add(weight)
        counts = []
        for _ in range(3):
            before = casts.of[weight]
            with casts:
                assert torch.equal(in_parts(module, keeper, rows), wanted)
            counts.append(casts.of[weight] - before)
        assert keeper.most_uses == uses
        assert counts == [4 * uses, *([1, 1] if uses == 1 else [4 * uses] * 2)]

    def test_a_weight_that_is_used_twice_later_is_cast_at_each_use_from_then_on(self):
        module, rows, keeper, casts = Shared(1), torch.randn(4, 8), CastKeeper(may_keep=True), Casts()
        casts.weights.add(address(module.shared.weight))
        for _ in range(2):
            in_parts(module, keeper, rows)
        module.uses = 2
        with casts:
            in_parts(module, keeper, rows)
        # The part that shows it has shared a cast: 16 bits round its gradient once more than those of others.
        assert casts.of[address(module.shared.weight)] == 1 + 3 * 2
        wanted = in_parts(module, CastKeeper(may_keep=False), rows)
        assert torch.equal(in_parts(module, keeper, rows), wanted)

    def test_where_it_may_not_nothing_is_looked_at(self):
        keeper = CastKeeper(may_keep=False)
        with keeper.batch():
            keeper.look(0, object())
        assert keeper.most_uses == 0
