"""Context parallelism, alone and with everything else, gives the loss and the gradients of a single process."""

from functools import cache

import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.model.split.splits import derive_contexts
from lightning_mist.runtime.executor import Executor
from tests.integration.parity import assert_equal, precision_of, reference, run_plan
from tests.integration.test_parity import plan_for, prepared
from tests.tiers import tiered

# Torch hides this one itself when a fake meets a tensor of the stage, but cannot where warnings are errors.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

PLANS = {
    "two ranks": {"stages": 1, "context": 2},
    "four ranks, checkpointed": {"stages": 1, "context": 4, "checkpointed": 2, "parts": 2},
    "optimizer sharded over tokens and rows": {"stages": 1, "context": 2, "degrees": [2], "zero": 1},
    "gradients sharded": {"stages": 1, "context": 2, "zero": 2, "parts": 2},
    "all sharded, checkpointed": {"stages": 1, "context": 2, "degrees": [2], "zero": 3, "checkpointed": 9},
    "all sharded in groups": {"stages": 1, "context": 2, "degrees": [2], "zero": 3, "shard": 2},
    "two stages": {"stages": 2, "context": 2, "parts": 2},
    "two stages, checkpointed, sharded": {"stages": 2, "context": 2, "checkpointed": 1, "zero": 2},
    "two chunks each": {"stages": 4, "chunks": 2, "context": 2, "checkpointed": 1},
    "zero bubble": {"stages": 2, "context": 2, "checkpointed": 1, "schedule": "zb-h1"},
    "from rows to tokens": {"stages": 2, "degrees": [2, 1], "context": [1, 2], "zero": [1, 0], "checkpointed": 9},
    "from tokens to rows": {"stages": 2, "degrees": [1, 2], "context": [2, 1], "zero": [0, 3]},
    "from two to four": {"stages": 2, "context": [2, 4], "parts": 2},
    "from tokens to whole rows": {"stages": 2, "context": [2, 1]},
}

CORE = ("two stages, checkpointed, sharded", "all sharded, checkpointed")
"""Plans that every model runs; one runs all."""

MODELS = ("nano", "gpt2", "llama", "lora_llama", "phi3", "falcon")


@cache
def shared(name, dtype=torch.float64):
    module, module_map, batches = prepared(name, dtype)
    return module, contexts_of(module, module_map, batches[0], (2, 4)), batches


def contexts_of(module, module_map, batch, degrees):
    with precision_of(module):
        return derive_contexts(module, lambda value: module.training_step(value, 0), batch, module_map, degrees)


EVERY = [(name, label) for name in MODELS for label in PLANS if label in CORE or name == "nano"]


@pytest.mark.combinations
@pytest.mark.parametrize(("name", "label"), tiered(EVERY, [case for case in EVERY if case[0] in ("nano", "llama")]))
def test_parity(name, label):
    module, module_map, batches = shared(name)
    plan = plan_for(len(module_map.blocks), **PLANS[label])
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.parametrize("label", ["two stages", "from tokens to rows"])
def test_sequences_of_any_length(label):
    """One that cannot be divided is computed whole by all ranks, on both sides of a boundary."""
    module, module_map, batches = shared("nano")
    plan = plan_for(4, **PLANS[label])
    lengths = [7, 8, 12, 6][: plan.world_size]
    batches = [
        tuple(part[:, :length].contiguous() for part in batch) for batch, length in zip(batches, lengths, strict=False)
    ]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.sample
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_parity_in_single_precision(name):
    module, module_map, batches = shared(name, torch.float32)
    plan = plan_for(len(module_map.blocks), stages=2, context=2, zero=[1, 0], checkpointed=1)
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


def test_nothing_is_gathered_but_keys_and_values():
    module, module_map, batches = shared("nano")
    plan = plan_for(4, stages=1, context=2)
    counted = []
    outcome = run_plan(
        module, module_map, plan, batches[:2], seen=lambda ranks: counted.extend(r.gathered() for r in ranks)
    )
    assert counted == [{}, {}]
    assert_equal(outcome, reference(module, batches[:2]))


def test_dropout_is_the_same_in_recomputation():
    module, module_map, batches = shared("nano_dropout")
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(2)]
    plans = [plan_for(4, stages=1, context=2, checkpointed=kept) for kept in (0, 9)]
    first, second = (run_plan(module, module_map, plan, batches[:2], states=states) for plan in plans)
    assert first.losses == second.losses
    for mine, other in zip(first.gradients[0].values(), second.gradients[0].values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert first.losses != reference(module, batches[:2]).losses


def test_what_was_not_shown_is_refused():
    module, module_map, batches = shared("nano")
    with pytest.raises(PlanError, match=r"context_parallel_degree = 3: .*use context_parallel_degree = 1 or 2 or 4"):
        run_plan(module, module_map, plan_for(4, stages=1, context=3), batches[:3])
    with pytest.raises(PlanError, match=r"tensor_parallel_degree = 2 with context_parallel_degree = 2"):
        Executor(plan_for(4, stages=1, context=2, tensor=2), 0, (), module_map, None, ())
