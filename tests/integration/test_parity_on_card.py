"""Every kind of plan on one card: all ranks in this process, all their tensors on the device, against one process."""

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests import turns
from tests.integration import test_parity as single
from tests.integration import test_parity_tensor as shared
from tests.integration.parity import assert_equal, map_of, reference, run_plan

pytestmark = pytest.mark.gpu

MODELS = ("nano", "llama")


def on_card(name):
    """A model, where it can be cut, and its batches, on the card."""
    device = torch.device("cuda", torch.cuda.current_device())
    module, _, batches = single.prepared(name, torch.float64)
    module = copy.deepcopy(module).to(device)  # what is prepared is prepared once
    batches = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batches)
    return module, map_of(module, batches[0]), batches


@pytest.mark.parametrize("label", single.PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_pipelines(name, label):
    module, module_map, batches = on_card(name)
    plan = single.plan_for(len(module_map.blocks), **single.PLANS[label])
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.parametrize("label", shared.PLANS)
def test_tensor_parallelism(label):
    module, module_map, batches = on_card("nano")
    plan = shared.plan_for(len(module_map.blocks), **shared.PLANS[label])
    batches = batches[: plan.world_size]
    found = shared.splits_of(module, module_map, batches[0], (2, 4))
    assert_equal(run_plan(module, found, plan, batches), reference(module, batches))


@pytest.mark.parametrize("label", ["two stages", "four stages", "two by two, sharded", "zero bubble of three stages"])
def test_backward_on_a_thread_of_the_device(label):
    """As training runs it; ranks that take turns run it on their own threads. No rank waits inside backward here."""
    module, module_map, batches = on_card("llama")
    plan = single.plan_for(len(module_map.blocks), **single.PLANS[label])
    batches = batches[: plan.world_size]
    with mock.patch.object(turns.torch.autograd, "set_multithreading_enabled", return_value=nullcontext()):
        outcome = run_plan(module, module_map, plan, batches)
    assert_equal(outcome, reference(module, batches))
