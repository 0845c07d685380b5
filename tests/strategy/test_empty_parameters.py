import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import HalfPrecision
from torch import nn

from lightning_mist import MistStrategy
from lightning_mist.errors import PlanError
from lightning_mist.model.initialization import empty_out
from lightning_mist.strategy.empty_parameters import (
    DeferredConstructions,
    convert,
    device_limit,
    has_empty_parameters,
    hollow_on_host,
    initial_values,
)
from lightning_mist.tensors import is_hollow

CPU = torch.device("cpu")


def test_each_construction_draws_its_own_numbers():
    constructions = DeferredConstructions()
    with constructions.context(True):
        one = nn.Linear(3, 3)
    with constructions.context(True), constructions.context(True):
        two = nn.Linear(3, 3)
    with constructions.context(None):
        plain = nn.Linear(3, 3)
    assert one.weight.is_meta
    assert two.weight.is_meta
    assert not has_empty_parameters(plain)
    first, second = (module.weight._mist_recipe.value(0) for module in (one, two))
    assert not torch.equal(first, second)


def test_lightning_asks_the_strategy_how_tensors_are_made():
    strategy = MistStrategy()
    with strategy.tensor_init_context(empty_init=True):
        assert torch.empty(2).device == CPU
        module = nn.Linear(2, 2)
    assert module.weight.is_meta
    with strategy.tensor_init_context():
        assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.usefixtures("single_rank")
def test_modules_with_values_are_left_alone_unless_they_are_too_large():
    module = nn.Linear(4, 4)
    before = module.weight.detach().clone()
    assert initial_values(module, CPU, None) is None
    assert initial_values(module, CPU, 80) is None
    values = initial_values(module, CPU, 79)
    assert has_empty_parameters(module)
    values.materialize(["weight"])
    assert torch.equal(module.weight, before)
    assert module.bias.isnan().all()


@pytest.mark.usefixtures("single_rank")
def test_values_that_rank_zero_has_lost_are_missed():
    module = nn.Linear(4, 4)
    empty_out(module.weight)
    with pytest.raises(PlanError, match=r"on rank 0 have no values \(they were freed\).*ckpt_path"):
        initial_values(module, CPU, None)


def _differently_built():
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = nn.Linear(3, 3)
    try:
        initial_values(module, CPU, None)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.thorough
def test_ranks_must_build_alike(gloo_workers):
    first, second = gloo_workers.run(2, _differently_built)
    assert first == second
    assert "rank 1 has 2 parameters without values and rank 0 has 0" in first


def test_a_limit_is_the_users_or_the_devices():
    assert device_limit(5, CPU) == 5
    assert device_limit(None, CPU) is None


def test_hollow_parameters_stay_hollow_on_the_host():
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    hollow_on_host(module)
    assert is_hollow(module.cpu().weight)
    assert not module.weight.is_meta


def test_buffers_of_several_values_in_little_memory_are_converted():
    module = nn.Linear(2, 2)
    module.register_buffer("rows", torch.arange(3.0).expand(4, 3))
    convert(module, HalfPrecision("bf16-true"))
    assert module.rows.dtype is torch.bfloat16
    assert module.rows.tolist() == [[0.0, 1.0, 2.0]] * 4
