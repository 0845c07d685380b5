"""Weights in 16 bits with masters in 32: every plan gives what the same arithmetic gives in a single process."""

import copy
from functools import partial
from itertools import cycle, product
from math import inf

import pytest
import torch

from lightning_mist.model import derive_splits
from tests import zoo
from tests.integration.masters import sgd, train_alone
from tests.integration.parity import MAX_NORM, cast, make_optimizer, make_plan, map_of, precision_of, train
from tests.memory_transport import InMemoryWorld, drive
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

STEPS, ROWS = 20, 4


OPTIMIZERS = {"AdamW": make_optimizer, "SGD": sgd}


def masters_of(module, compute):
    """The trained parameters' values, and the module cast to the type that is computed in."""
    values = {name: p.data for name, p in module.named_parameters() if p.requires_grad}
    return values, module.to(compute)


def batches_of(make_batch, world, dtype):
    torch.manual_seed(3)
    return [[cast(make_batch(ROWS), dtype) for _ in range(world)] for _ in range(STEPS)]


def outcome(name, plan, compute, optimize, tensor=1):
    torch.manual_seed(1)
    module, make_batch = zoo.make(name)
    wide = torch.float64 if compute is torch.float32 else torch.float32
    module = module.to(wide)
    steps = batches_of(make_batch, plan.world_size, compute)
    with precision_of(module):
        narrow = copy.deepcopy(module).to(compute)
        module_map, batch = map_of(narrow, steps[0][0]), steps[0][0]
        if tensor > 1:
            step = partial(narrow.training_step, batch_idx=0)
            module_map = derive_splits(narrow, step, batch, module_map, (tensor,))
        # Norms of pieces add up in another order, and what rounds otherwise once is another number of 16 bits.
        is_narrow = compute is torch.bfloat16 and any(stage.zero_stage for stage in plan.stages)
        max_norm = inf if is_narrow else MAX_NORM
        expected = train_alone(module, plan, module_map, steps, compute, optimize, max_norm=max_norm)
        world = InMemoryWorld(plan.world_size)
        ranks = []
        for transport in world.transports:
            values, own = masters_of(copy.deepcopy(module), compute)
            ranks.append(train(own, module_map, plan, steps, transport, values, optimize, max_norm))
        return drive(ranks), expected


def assert_same(ranks, expected, tolerance):
    losses, masters, optimizer = expected
    for step, wanted in enumerate(losses):
        for owner, loss in enumerate(wanted):
            got = sum(rank.losses[step].get(owner, 0.0) for rank in ranks)
            torch.testing.assert_close(got, loss, rtol=max(tolerance, 1e-6), atol=max(tolerance, 1e-6))
    for rank in ranks:
        for name, value in masters.named_parameters():
            wanted = value.detach() if value.requires_grad else value.detach().to(rank.parameters[name].dtype)
            assert rank.parameters[name].dtype == wanted.dtype
            torch.testing.assert_close(rank.parameters[name], wanted, rtol=tolerance, atol=tolerance)
    mine, wanted = ranks[0].optimizer["state"], optimizer.state_dict()["state"]
    assert mine.keys() == wanted.keys()
    for number, entry in wanted.items():
        for key, value in entry.items():
            torch.testing.assert_close(mine[number][key], value, rtol=tolerance, atol=tolerance)


PLANS = {
    "one process": {"layers": [4], "parts": 2},
    "data parallel": {"layers": [4], "degrees": [2]},
    "data parallel, accumulated": {"layers": [4], "degrees": [2], "parts": 2},
    "optimizer sharded": {"layers": [4], "degrees": [2], "parts": 2, "zero": 1},
    "gradients sharded": {"layers": [4], "degrees": [2], "parts": 2, "zero": 2},
    "all sharded": {"layers": [4], "degrees": [2], "parts": 2, "zero": 3, "checkpointed": 2},
    "two stages": {"layers": [2, 2], "parts": 2, "checkpointed": 1},
    "zero bubble": {"layers": [2, 2], "parts": 2, "schedule": "zb-h1"},
    "chunks": {"layers": [1, 1, 1, 1], "parts": 2, "chunks": 2, "schedule": "interleaved-1f1b"},
    "two by two": {"layers": [2, 2], "degrees": [2, 2], "parts": 2},
    "two by two, all sharded": {"layers": [2, 2], "degrees": [2, 2], "parts": 2, "zero": 3},
}


@pytest.mark.parametrize(
    ("plan", "optimizer"), tiered(product(PLANS, OPTIMIZERS), [*zip(PLANS, cycle(OPTIMIZERS), strict=False)])
)
def test_twenty_steps_are_the_same_to_the_bit(plan, optimizer):
    ranks, expected = outcome("vit", make_plan(**PLANS[plan]), torch.bfloat16, OPTIMIZERS[optimizer])
    assert_same(ranks, expected, 0.0)


@pytest.mark.parametrize(
    "plan",
    tiered(
        ["data parallel, accumulated", "gradients sharded", "all sharded", "two stages"], ["all sharded", "two stages"]
    ),
)
def test_frozen_parameters_have_the_computing_type(plan):
    ranks, expected = outcome("lora_llama", make_plan(**PLANS[plan]), torch.bfloat16, make_optimizer)
    assert_same(ranks, expected, 0.0)


@pytest.mark.parametrize("plan", tiered(["data parallel, accumulated", "all sharded"], ["all sharded"]))
def test_a_weight_used_twice_is_the_same_to_the_bit(plan):
    ranks, expected = outcome("gpt2", make_plan(**PLANS[plan]), torch.bfloat16, make_optimizer)
    assert_same(ranks, expected, 0.0)


@pytest.mark.parametrize("zero", tiered([0, 1, 3], [3]))
def test_a_weight_tied_over_stages_sums_in_the_masters_type(zero):
    """In another order than in one process: single precision, masters double."""
    plan = make_plan([2, 2], degrees=[2, 2], parts=2, zero=zero)
    ranks, expected = outcome("nano", plan, torch.float32, sgd)
    assert_same(ranks, expected, 1e-5)


@pytest.mark.parametrize(
    "settings",
    tiered(
        [{"sequence": False}, {"sequence": True, "zero": 3, "degrees": [2]}],
        [{"sequence": True, "zero": 3, "degrees": [2]}],
    ),
)
def test_tensor_parallelism(settings):
    """Parts are summed in another order than in one process: within rounding of single precision, masters double."""
    torch.manual_seed(1)
    ranks, expected = outcome("gpt2_even", make_plan([4], tensor=2, **settings), torch.float32, sgd, tensor=2)
    assert_same(ranks, expected, 1e-5)
